"""A run as a series of pictures: who holds which block on which tier, after each thing that the cache did."""

from pagedkv.recording.file import read_recording as read_recording
from pagedkv.recording.model import Frame as Frame
from pagedkv.recording.model import HeldBlock as HeldBlock
from pagedkv.recording.model import Move as Move
from pagedkv.recording.model import Recording as Recording
from pagedkv.recording.model import SequenceState as SequenceState
from pagedkv.recording.recorder import Recorder as Recorder
