"""The number that stands for a token that a partly filled block lacks."""

NO_TOKEN = -(2**31)
