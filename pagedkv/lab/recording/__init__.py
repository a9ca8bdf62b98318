"""A run as a series of frames: who holds which block on which tier after each event."""

from pagedkv.lab.recording.file import read_recording as read_recording
from pagedkv.lab.recording.groups import GroupOfLayers as GroupOfLayers
from pagedkv.lab.recording.groups import HeldPage as HeldPage
from pagedkv.lab.recording.groups import PageTable as PageTable
from pagedkv.lab.recording.groups import Point as Point
from pagedkv.lab.recording.model import Frame as Frame
from pagedkv.lab.recording.model import HeldBlock as HeldBlock
from pagedkv.lab.recording.model import Move as Move
from pagedkv.lab.recording.model import Recording as Recording
from pagedkv.lab.recording.model import SequenceState as SequenceState
from pagedkv.lab.recording.recorder import Recorder as Recorder
