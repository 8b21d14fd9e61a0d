# ruff: noqa: F401
"""What takes seconds to import: the server that ranks of tests are forked from imports it once."""

from __future__ import annotations

import gc

import pytest
import torch._dynamo  # FSDP imports it at its first use
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers.models.llama.modeling_llama

import legato.checkpoint
import legato.recipes.model
import legato.train.step
import tests.helpers.sharded

# A child's collector needn't look through all that, nor make copies of its pages.
gc.freeze()
