"""A small, trained omni pipeline that draws handwritten digits; the worked example of the API.

>>> from omni_components.demo import DemoPipeline
>>> DemoPipeline.from_pretrained()("three one four").images[0].size
(384, 128)
"""

from omni_components.demo.pipeline import DemoOutput, DemoPipeline
from omni_components.demo.text import Phrase, PromptError, parse_prompt
from omni_components.demo.text_encoder import DemoTextEncoder
from omni_components.demo.transformer import DemoTransformer, PromptMemory
from omni_components.demo.vae import DemoVae

__all__ = [
    "DemoOutput",
    "DemoPipeline",
    "DemoTextEncoder",
    "DemoTransformer",
    "DemoVae",
    "Phrase",
    "PromptError",
    "PromptMemory",
    "parse_prompt",
]
