"""The core for C and C++: the header ``include/pagedkv.h``, and the functions behind it.

``prefixes`` and ``rows`` check arguments, take the mutex and call the core; ``api`` makes and deletes objects, and has
the struct of function pointers that the header imports.
"""

from pathlib import Path


def get_include() -> str:
    """Return the folder of ``pagedkv.h``, for a C compiler's ``-I``."""
    return str(Path(__file__).with_name("include"))
