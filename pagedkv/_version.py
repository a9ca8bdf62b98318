"""The version, written once: pyproject.toml and ``pagedkv.__version__`` read it from here."""

__version__ = "0.1.0.dev0"
