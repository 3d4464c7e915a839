from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AudioLDMPipeline
from transformers import (
    ClapTextConfig,
    ClapTextModelWithProjection,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
)

from tests.diffusers import tiny
from tests.helpers.fixtures import seeded, sim

__all__ = ["folder", "picture_folder", "seeded", "sim", "sound_folder", "video_folder"]


@pytest.fixture(scope="session")
def picture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Stable Diffusion pipeline with tiny random weights, as ``save_pretrained`` writes it."""
    return _saved(tiny.stable_diffusion(), tmp_path_factory.mktemp("picture"))


@pytest.fixture(scope="session")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Wan 2.2 pipeline with tiny random weights."""
    return _saved(tiny.wan(), tmp_path_factory.mktemp("video"))


@pytest.fixture(scope="session")
def sound_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An AudioLDM pipeline with tiny random weights: a CLAP encoder, a UNet, a VAE, a vocoder."""
    torch.manual_seed(7)
    pipeline = AudioLDMPipeline(
        text_encoder=_clap(),
        tokenizer=tiny.tokenizer(begins=True),
        unet=tiny.unet(
            (64, 128),
            class_embed_type="simple_projection",
            projection_class_embeddings_input_dim=32,
            class_embeddings_concat=True,
        ),
        vae=tiny.vae(4, in_channels=1, out_channels=1),
        scheduler=tiny.ddim(),
        vocoder=_vocoder(),
    )
    return _saved(pipeline, tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _saved(pipeline, place: Path) -> Path:
    pipeline.save_pretrained(place)
    return place


def _clap() -> ClapTextModelWithProjection:
    marks = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    size = {"vocab_size": len(tiny.VOCABULARY), "projection_dim": 32, "max_position_embeddings": 40}
    return ClapTextModelWithProjection(ClapTextConfig(**marks, **shape, **size)).eval()


def _vocoder() -> SpeechT5HifiGan:
    """Mel bins to samples: the VAE halves the vocoder's 8 bins once."""
    return SpeechT5HifiGan(
        SpeechT5HifiGanConfig(
            model_in_dim=8,
            sampling_rate=16_000,
            upsample_initial_channel=16,
            upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
            normalize_before=False,
        )
    ).eval()
