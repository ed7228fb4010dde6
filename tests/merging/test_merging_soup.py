"""The soup: arithmetic by hand, independence of order and layout, and every refusal by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from occamy.contracts.lineage import LineageCard, read_card, tokenizer_digest, weights_digest, write_card
from occamy.merging.checkpoint import Checkpoint, CheckpointError
from occamy.merging.layout import LayoutError, MoeShape, canonical
from occamy.merging.soup import MergeError, average, merge

EXPERTS, WIDTH, HIDDEN = 2, 3, 6  # 2 * WIDTH == HIDDEN: sizes alone cannot tell gate_up_proj's axes apart
ROOT = "sha256:root"
EMBED = "model.embed_tokens.weight"
MLP = "model.layers.0.mlp.experts"


def make(
    folder: Path,
    seed: int,
    *,
    fused: bool = False,
    dtype: torch.dtype = torch.float32,
    vocab: int = 5,
    root: str = ROOT,
    config: dict[str, object] | None = None,
    words: str = "a b c",
    edit: dict[str, torch.Tensor] | None = None,
) -> Path:
    """A checkpoint of one layer's experts and an embedding, in either layout, from one seed."""
    folder.mkdir(parents=True)
    g = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=g).to(dtype)
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=g).to(dtype)
    tensors = {EMBED: torch.randn(vocab, HIDDEN, generator=g).to(dtype)}
    if fused:
        tensors |= {f"{MLP}.gate_up_proj": gate_up, f"{MLP}.down_proj": down}
    else:
        for e in range(EXPERTS):
            tensors[f"{MLP}.{e}.gate_proj.weight"] = gate_up[e, :WIDTH].clone()
            tensors[f"{MLP}.{e}.up_proj.weight"] = gate_up[e, WIDTH:].clone()
            tensors[f"{MLP}.{e}.down_proj.weight"] = down[e].clone()
    save_file(tensors | (edit or {}), folder / "model.safetensors", {"format": "pt"})
    settings_ = {"model_type": "qwen3_moe", "num_experts": 2, "moe_intermediate_size": 3, "hidden_size": 6}
    (folder / "config.json").write_text(json.dumps(settings_ | (config or {})))
    (folder / "tokenizer.json").write_text(json.dumps(words.split()))
    return card(folder, seed, root)


def card(folder: Path, seed: int, root: str = ROOT) -> Path:
    """Write the card of a made or edited folder."""
    made = LineageCard(
        name=f"expert-{seed}",
        stage="sft",
        root=root,
        seed=seed,
        tokenizer_digest=tokenizer_digest(folder),
        weights_digest=weights_digest(folder),
    )
    write_card(folder, made)
    return folder


def soup(parents: list[Path], out: Path, **kwargs: object) -> LineageCard:
    return merge(parents, out, name="soup", recipe_digest="sha256:recipe", seed=7, **kwargs)  # type: ignore[arg-type]


def test_bf16_is_accumulated_wide_and_rounded_once() -> None:
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    assert average(parts, [1 / 3] * 3, uniform=True).item() == 86.0  # 258 / 3; a bf16 sum stays at 256
    assert average(parts, [1.0, 1.0, 1.0], uniform=False).item() == 258.0


def test_fp32_average_of_equal_tensors_is_exact() -> None:
    x = torch.tensor([0.1, 1e-8, 3e8])
    assert torch.equal(average([x, x, x], [1 / 3] * 3, uniform=True), x)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(3)), st.lists(st.integers(-(10**6), 10**6), min_size=3, max_size=3))
def test_average_of_sorted_parents_lies_between_them(order: list[int], values: list[int]) -> None:
    parts = [torch.tensor([values[i] / 7], dtype=torch.float32) for i in order]
    got = average(parts, [1 / 3] * 3, uniform=True).item()
    assert min(p.item() for p in parts) <= got <= max(p.item() for p in parts)


def test_uniform_soup_of_two(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    made = soup([a, b], tmp_path / "out")
    x, y, z = (load_file(f / "model.safetensors") for f in (a, b, tmp_path / "out"))
    assert z.keys() == x.keys()
    for name in z:
        assert torch.equal(z[name], ((x[name].double() + y[name].double()) / 2).float())
    assert made.weights_digest == weights_digest(tmp_path / "out") == read_card(tmp_path / "out").weights_digest
    assert (made.stage, made.root, made.seed) == ("merge", ROOT, 7)
    assert set(made.parents) == {read_card(a).weights_digest, read_card(b).weights_digest}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (a / "tokenizer.json").read_bytes()


def test_order_of_parents_and_layout_do_not_matter(tmp_path: Path) -> None:
    a, b, c = (make(tmp_path / str(i), i, dtype=torch.bfloat16) for i in (1, 2, 3))
    fused = make(tmp_path / "fused", 3, dtype=torch.bfloat16, fused=True)
    first = soup([a, b, c], tmp_path / "x")
    assert soup([c, a, b], tmp_path / "y") == first
    assert soup([a, fused, b], tmp_path / "z").weights_digest == first.weights_digest


def test_weights_follow_their_parents(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    first = soup([a, b], tmp_path / "x", weights=[0.25, 0.75])
    assert soup([b, a], tmp_path / "y", weights=[3.0, 1.0], normalise=True) == first
    x, y, z = (load_file(f / "model.safetensors")[EMBED].double() for f in (a, b, tmp_path / "x"))
    assert torch.allclose(z, 0.25 * x + 0.75 * y, atol=1e-7)


@pytest.mark.parametrize(
    ("weights", "says"),
    [([0.5, 0.6], "sum to 1.1"), ([1.0], "1 weights for 2"), ([1.5, -0.5], "-0.5"), ([float("nan"), 1.0], "nan")],
)
def test_weights_are_never_silently_corrected(tmp_path: Path, weights: list[float], says: str) -> None:
    parents = [make(tmp_path / "a", 1), make(tmp_path / "b", 2)]
    with pytest.raises(MergeError, match=says):
        soup(parents, tmp_path / "out", weights=weights)
    assert not (tmp_path / "out").exists()


def test_same_merge_is_returned_untouched_and_another_is_refused(tmp_path: Path) -> None:
    a, b, c = (make(tmp_path / str(i), i) for i in (1, 2, 3))
    first = soup([a, b], tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    assert soup([b, a], tmp_path / "out") == first
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="another folder"):
        soup([a, c], tmp_path / "out")


def test_a_crash_leaves_no_folder_and_the_next_try_succeeds(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    soup([a, b], tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()


def test_rows_beyond_the_tokenizer_are_kept(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 1, vocab=9), make(tmp_path / "b", 2, vocab=9)
    soup([a, b], tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")[EMBED].shape == (9, HIDDEN)


def test_sharded_parents_give_the_same_soup(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    whole = soup([a, b], tmp_path / "x")
    shard(b)
    assert soup([a, card(b, 2)], tmp_path / "y").weights_digest == whole.weights_digest


def shard(folder: Path) -> None:
    """Split a checkpoint's weights over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {n: f"model-0000{1 + (n == EMBED)}-of-00002.safetensors" for n in tensors}
    for file in sorted(set(where.values())):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"root": "sha256:stranger"}, "common root differs.*stranger"),
        ({"words": "a b d"}, "tokenizer differs: 'sha256"),
        ({"config": {"rope_theta": 5}}, "config.json: rope_theta differs"),
        ({"dtype": torch.bfloat16}, "dtype differs: '(F32|BF16)' in .* '(F32|BF16)' in"),
        ({"vocab": 4}, r"tensor model\.embed_tokens\.weight: shape differs: \[[45], 6\] in .*\[[45], 6\] in"),
        ({"edit": {"extra.weight": torch.ones(2)}}, "tensor extra.weight: shape differs"),
    ],
)
def test_preconditions_name_what_differs(tmp_path: Path, change: dict[str, object], says: str) -> None:
    parents = [make(tmp_path / "a", 1), make(tmp_path / "b", 2, **change)]  # type: ignore[arg-type]
    with pytest.raises(MergeError, match=says):
        soup(parents, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_chat_template_is_refused(tmp_path: Path) -> None:
    parents = [make(tmp_path / "a", 1), make(tmp_path / "b", 2)]
    (parents[1] / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(MergeError, match="chat template differs"):
        soup(parents, tmp_path / "out")


def test_nan_is_refused_by_tensor_name_and_leaves_nothing(tmp_path: Path) -> None:
    bad = torch.full((5, HIDDEN), float("nan"))
    parents = [make(tmp_path / "a", 1), make(tmp_path / "b", 2, edit={EMBED: bad})]
    with pytest.raises(CheckpointError, match=r"b: model\.embed_tokens\.weight holds NaN"):
        soup(parents, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_truncated_altered_and_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    weights = b / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match=r"b: model\.safetensors is missing or truncated"):
        soup([a, b], tmp_path / "out")
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"weights has digest .* its card says"):
        soup([a, b], tmp_path / "out")
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        soup([a, b], tmp_path / "out")


def test_foreign_shards_are_refused_by_name(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    shutil.copy(a / "model.safetensors", b / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors is a foreign shard"):
        soup([a, b], tmp_path / "out")
    (b / "adapter.safetensors").unlink()
    shard(b)
    index = b / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    del where["weight_map"][f"{MLP}.1.up_proj.weight"]
    index.write_text(json.dumps(where))
    with pytest.raises(CheckpointError, match=rf"{MLP}\.1\.up_proj\.weight lies in .* says None; a foreign"):
        soup([a, card(b, 2)], tmp_path / "out")


def test_layout_comes_from_the_config_not_from_sizes() -> None:
    shape = MoeShape(experts=EXPERTS, width=WIDTH, hidden=HIDDEN)
    with pytest.raises(LayoutError, match=r"gate_up_proj: stored shape \[2, 6, 7\], config.json declares \[2, 6, 6\]"):
        canonical({f"{MLP}.gate_up_proj": (2, 6, 7)}, shape)
    with pytest.raises(LayoutError, match="declares no experts"):
        canonical({f"{MLP}.gate_up_proj": (2, 6, 6)}, None)
    with pytest.raises(LayoutError, match="stored twice"):
        canonical({f"{MLP}.down_proj": (2, 6, 3), f"{MLP}.0.down_proj.weight": (6, 3)}, shape)


def test_unknown_expert_architecture_is_refused(tmp_path: Path) -> None:
    a = make(tmp_path / "a", 1, config={"model_type": "mixtral"})
    with pytest.raises(LayoutError, match="'mixtral' has 2 experts"), Checkpoint(a):
        pass


def test_transformers_loads_the_soup_and_both_layouts_compute_the_same(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=11,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        tie_word_embeddings=True,
    )
    parents = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        folder = tmp_path / str(seed)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        parents.append(card(folder, seed))
    soup(parents, tmp_path / "out")
    merged, report = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    one, two = (Qwen3MoeForCausalLM.from_pretrained(p).state_dict() for p in parents)
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, (one[name] + two[name]) / 2, atol=1e-7), name
