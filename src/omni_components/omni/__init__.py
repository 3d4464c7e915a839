"""A model by name, asked for pictures, video or sound; its components take turns if wanted."""

from .omni import Omni
from .output import OmniOutput
from .source import DEMO, DTYPES, as_dtype

__all__ = ["DEMO", "DTYPES", "Omni", "OmniOutput", "as_dtype"]
