"""``python -m examples.server``."""

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported, as in examples/llama_numpy

try:
    from examples.server.command import main
except ImportError as error:
    sys.exit(f"server: error: {error}")

sys.exit(main())
