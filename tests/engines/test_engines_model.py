"""The functional forward against transformers, over prompt chunks and decode steps in scattered cache rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from occamy.engines.local.model import Chunk, FlatBatch, Model

COMMON = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MOE = COMMON | {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}


def hugging_face(kind: str):
    import transformers as t

    return {
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(**MOE, norm_topk_prob=True, tie_word_embeddings=True)
        ),
        "qwen3_moe, one dense layer, weights not rescaled": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(**MOE, norm_topk_prob=False, mlp_only_layers=[1], tie_word_embeddings=False)
        ),
        "qwen3": lambda: t.Qwen3ForCausalLM(
            t.Qwen3Config(**COMMON, attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        ),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**COMMON, attention_bias=True)),
    }[kind]()


def ragged_logits(model: Model, tokens: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Logits [sequences, length, vocab], through two rounds of chunks and then single tokens beside a last chunk."""
    cache = model.new_cache(10, 64)
    count, length = tokens.shape
    out = torch.empty(count, length, model.spec.vocab)
    for start, end in ((0, 7), (7, 12)):
        width = end - start
        chunks = [Chunk(i * width, width, row, start) for i, row in enumerate(rows)]
        positions = np.tile(np.arange(start, end), count)
        flat = FlatBatch(tokens[:, start:end].reshape(-1).numpy(), positions, np.repeat(rows, width), 0, chunks)
        out[:, start:end] = model.forward(flat, cache, np.arange(count * width)).view(count, width, -1)
    order = sorted(range(count), key=lambda i: rows[i])
    single, late = order[:-1], order[-1]
    for at in range(12, length):
        row = np.array([rows[i] for i in single])
        flat = FlatBatch(tokens[single, at].numpy(), np.full(len(single), at), row, len(single), [])
        out[single, at] = model.forward(flat, cache, np.arange(len(single)))
    # The last sequence catches up with one chunk, beside one more single token of the others (written again in place).
    width, n = length - 12, len(single)
    ids = np.concatenate([tokens[single, length - 1].numpy(), tokens[late, 12:].numpy()])
    positions = np.concatenate([np.full(n, length - 1), np.arange(12, length)])
    where = np.concatenate([np.array([rows[i] for i in single]), np.full(width, rows[late])])
    flat = FlatBatch(ids, positions, where, n, [Chunk(n, width, rows[late], 12)])
    logits = model.forward(flat, cache, np.arange(n + width))
    assert torch.allclose(logits[:n], out[single, length - 1], atol=1e-4)
    out[late, 12:] = logits[n:]
    return out


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_moe, one dense layer, weights not rescaled", "qwen3", "llama"])
@torch.no_grad()
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    reference = hugging_face(kind).eval()
    for parameter in reference.parameters():
        if parameter.ndim == 1:  # norms and biases: away from their neutral start
            parameter.normal_(1.0, 0.3)
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(0, 60, (4, 20))
    ours = ragged_logits(Model.load(tmp_path), tokens, rows=[5, 1, 8, 3])
    theirs = reference(tokens).logits
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() <= 1e-4


@torch.no_grad()
def test_per_expert_and_fused_files_and_bfloat16_serve_the_same(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                split[f"{prefix}.{e}.gate_proj.weight"] = both[:8].clone()
                split[f"{prefix}.{e}.up_proj.weight"] = both[8:].clone()
        elif name.endswith("experts.down_proj"):
            split |= {f"{prefix}.{e}.down_proj.weight": one.clone() for e, one in enumerate(tensor)}
        else:
            split[name] = tensor
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in split and len(split) > len(tensors)
    half = {k: v.bfloat16() for k, v in tensors.items()}
    logits = {}
    for name, content in (("fused", tensors), ("split", split), ("half", half)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
        save_file(content, folder / "model.safetensors")
        loaded = Model.load(folder)
        flat = FlatBatch(np.arange(6), np.arange(6), np.zeros(6, dtype=np.int64), 0, [Chunk(0, 6, 0, 0)])
        logits[name] = loaded.forward(flat, loaded.new_cache(1, 8), np.arange(6))
    assert torch.equal(logits["fused"], logits["split"])
    assert 0 < (logits["fused"] - logits["half"]).abs().max() < 0.5
