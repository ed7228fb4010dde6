"""The policy against transformers, and packs against single sequences. This process becomes a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from occamy.training.config import OptimiserConfig
from occamy.training.device import Place
from occamy.training.packing import Pack, pack
from occamy.training.views import TrainingSequence

pytestmark = pytest.mark.usefixtures("trainer")


def sequence(seed: int, n: int) -> TrainingSequence:
    rng = np.random.default_rng(seed)
    mask = rng.random(n) < 0.6
    mask[0] = False
    return TrainingSequence(
        tokens=rng.integers(0, 64, n).astype(np.int32),
        mask=mask,
        logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        episode_id=f"e{seed}",
        task_id="t",
        segment=0,
        n_segments=1,
        policy_tokens_run=int(mask.sum()),
        policy_tokens_later=0,
        reward=1.0,
        success=True,
        steps=1,
    )


def reference_logits(checkpoint: Path, row: Pack) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat(
            [
                model(torch.from_numpy(s.tokens.astype(np.int64))[None]).logits[0, np.flatnonzero(s.mask) - 1]
                for s in row.sequences
            ]
        )


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"norm_topk_prob": False, "fused": False}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 2.9}}),
    ],
)
def test_logits_agree_with_transformers(
    family: str, settings: dict[str, Any], make_checkpoint: Callable[..., Path]
) -> None:
    from occamy.training.model import load_hf

    checkpoint = make_checkpoint(family, **settings)
    row = pack([sequence(1, 13), sequence(2, 33), sequence(3, 20)])
    model = load_hf(checkpoint).eval()
    with torch.no_grad():
        difference = (model.logits(row) - reference_logits(checkpoint, row)).abs().max()
    assert difference <= 1e-4


@pytest.mark.parametrize("fused", [True, False])
def test_export_gives_back_the_same_file(fused: bool, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from occamy.training.model import export_hf, load_hf

    checkpoint = make_checkpoint("qwen3_moe", tie_word_embeddings=True, fused=fused)
    export_hf(load_hf(checkpoint), checkpoint, tmp_path)
    from safetensors.torch import load_file

    before, after = (load_file(f / "model.safetensors") for f in (checkpoint, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert not (tmp_path / "lineage.json").exists()


def test_a_partial_checkpoint_does_not_load(make_checkpoint: Callable[..., Path]) -> None:
    from safetensors.torch import load_file, save_file

    from occamy.training.mapping import MappingError
    from occamy.training.model import load_hf

    checkpoint = make_checkpoint("llama")
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(MappingError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_hf(checkpoint)


def test_a_pack_scores_like_its_documents_alone(make_checkpoint: Callable[..., Path]) -> None:
    from occamy.training.model import load_hf

    model = load_hf(make_checkpoint("qwen3_moe")).eval()
    a, b, other = sequence(1, 17), sequence(2, 29), sequence(9, 17)
    with torch.no_grad():
        together = -model(pack([a, b])).logprobs
        alone = [-model(pack([s])).logprobs for s in (a, b)]
        changed = -model(pack([other, b])).logprobs
    targets = a.policy_tokens + b.policy_tokens
    assert float(together.sum()) / targets == pytest.approx(float(sum(x.sum() for x in alone)) / targets, abs=1e-5)
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    assert torch.allclose(changed[-b.policy_tokens :], together[-b.policy_tokens :], atol=1e-5)


def test_entropy_is_that_of_the_predicted_distribution(make_checkpoint: Callable[..., Path]) -> None:
    from occamy.training.model import load_hf

    model, row = load_hf(make_checkpoint("llama")).eval(), pack([sequence(1, 9)])
    with torch.no_grad():
        scores, logits = model(row, entropy=True), model.logits(row)
    assert scores.entropy is not None
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(scores.entropy, expected, atol=1e-5)
    assert model(row).entropy is None


def test_learner_sums_gradients_over_packs_and_resumes_exactly(make_checkpoint: Callable[..., Path]) -> None:
    from occamy.training.learner import Learner
    from occamy.training.model import load_hf

    checkpoint = make_checkpoint("qwen3_moe")
    adam = OptimiserConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1)
    documents = [sequence(i, 20) for i in range(4)]
    targets, tokens = sum(s.policy_tokens for s in documents), 80

    def step(learner: Learner[Any], rows: list[Pack]) -> float:
        learner.begin()
        for row in rows:
            learner.backward(-learner.model(row).logprobs.sum() / targets)
        return learner.finish().grad_norm

    split, joined = (Learner(load_hf(checkpoint), adam, 4) for _ in range(2))
    norms = step(split, [pack([s]) for s in documents]), step(joined, [pack(documents)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)

    state = {k: (v if k == "step" else _copied(v)) for k, v in split.state_dict().items()}
    step(split, [pack(documents)])
    resumed = Learner(load_hf(checkpoint), adam, 4)
    resumed.load_state_dict(state)
    step(resumed, [pack(documents)])
    assert resumed.step == split.step == 2
    for one, other in zip(split.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert tokens == sum(len(s) for s in documents)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def test_frozen_parameters_stay_and_bad_patterns_are_refused(make_checkpoint: Callable[..., Path]) -> None:
    from occamy.training.learner import Learner
    from occamy.training.model import load_hf

    model = load_hf(make_checkpoint("llama"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = Learner(model, OptimiserConfig(lr=1e-2), 1, ("embedding.*", "decoder.layers.0.*"))
    learner.begin()
    learner.backward(-model(pack([sequence(1, 20)])).logprobs.mean())
    learner.finish()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {n for n in before if not n.startswith(("embedding.", "decoder.layers.0."))}
    with pytest.raises(ValueError, match=r"freeze pattern 'vision\.\*' matches no parameter"):
        Learner(load_hf(make_checkpoint("llama")), OptimiserConfig(), 1, ("vision.*",))
    with pytest.raises(ValueError, match="leave nothing to train"):
        Learner(load_hf(make_checkpoint("llama")), OptimiserConfig(), 1, ("*",))


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(make_checkpoint: Callable[..., Path]) -> None:
    from occamy.training.learner import Learner
    from occamy.training.model import load_hf

    learner = Learner(load_hf(make_checkpoint("llama")), OptimiserConfig(lr=1e-2), 2)
    before = [p.detach().clone() for p in learner.model.parameters()]
    for spoilt in (float("nan"), float("inf")):
        learner.begin()
        learner.backward(learner.model(pack([sequence(1, 20)])).logprobs.sum() * spoilt)
        with pytest.raises(FloatingPointError, match=r"optimiser step 0: the gradient norm is .*lower lr 0\.01"):
            learner.finish()
    assert learner.step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_load_balancing_loss_enters_once_per_step(make_checkpoint: Callable[..., Path]) -> None:
    from occamy.training.learner import Learner
    from occamy.training.model import load_hf

    checkpoint, documents = make_checkpoint("qwen3_moe"), [sequence(i, 24) for i in range(2)]

    def router_gradient(rows: list[Pack], share: float) -> Tensor:
        learner = Learner(load_hf(checkpoint, aux_loss_coefficient=1.0), OptimiserConfig(clip_norm=1e9), 1)
        learner.begin()
        for row in rows:
            learner.backward(0.0 * learner.model(row).logprobs.sum(), aux_share=share)
        return learner.model.decoder.layers[0].mlp.router.weight.main_grad.clone()

    twice = router_gradient([pack([documents[0]])] * 2, 1 / 48)
    once = router_gradient([pack([documents[0]])], 1 / 24)
    assert float(once.abs().max()) > 0
    assert torch.allclose(twice, once, atol=1e-7)


def test_this_process_is_a_cpu_trainer(trainer: Place) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is there: the CPU shim is not used")
    assert (trainer.backend, trainer.rank, trainer.world, trainer.leader) == ("gloo", 0, 1, True)
    assert torch.are_deterministic_algorithms_enabled()
