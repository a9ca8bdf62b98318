"""``python -m examples.llama_numpy "prompt"``."""

import sys

from examples.llama_numpy.command import main

sys.exit(main())
