"""From data files to the tensors of a step."""

from legato.data.build import build_data, split_validation
from legato.data.chat import ChatFormatter
from legato.data.examples import Example, Message, Segment
from legato.data.formats import DatasetSpec
from legato.data.loader import Batch, Loader
from legato.data.samples import DataReport, DatasetReport, Sample, TokenizedData
from legato.data.show import marked_sample

__all__ = [
    "DatasetSpec",
    "Example",
    "Message",
    "Segment",
    "ChatFormatter",
    "Sample",
    "TokenizedData",
    "DataReport",
    "DatasetReport",
    "build_data",
    "split_validation",
    "Loader",
    "Batch",
    "marked_sample",
]
