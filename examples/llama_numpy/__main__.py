"""``python -m examples.llama_numpy "prompt"``."""

import os
import sys

# Read when NumPy is first imported. Several threads for products as small as these wait for each other, and take the
# CPUs from pagedkv's attention, whose threads run in turns with them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from examples.llama_numpy.command import main

sys.exit(main())
