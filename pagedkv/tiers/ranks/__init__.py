"""Moves of one deciding process, carried out by ranks that each hold a part of every block.

`wire` and `frames` carry them, `handshake` opens, `group`, `mover` and `store` are the deciding process's side, `hands`
a rank's.
"""
