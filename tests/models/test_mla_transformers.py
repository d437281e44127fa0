"""MLA models against transformers' independent implementations: logits of random models in float32."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.models.deepseek_mla.config import parse_config
from dsv4lite.models.deepseek_mla.names import mla_names
from tests.golden import plain
from tests.mla import VARIANTS, filled, official, our_model, their_config, trainer_model
from tests.models.pairs import Pair


def make_pair(variant: str, *, deterministic: bool = False) -> Pair:
    theirs = trainer_model(variant)
    return Pair(variant, theirs, our_model(theirs, variant, plain(deterministic)), mla_names(their_config(theirs, variant)))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return make_pair(request.param)


@pytest.mark.parametrize("count", [1, 2, 6, 7, 40, 130, 300])
def test_logits_of_one_pass_agree(pair: Pair, count: int) -> None:
    """A selection among 300 tokens has boundaries within the rounding of scores: there most tokens agree, and those before it."""
    apart_T = ~(pair.distances(count) < 1e-4)
    assert not apart_T.any() or (pair.ours.config.selects and count == 300 and apart_T.sum() <= 15 and not apart_T[:100].any())


@pytest.mark.parametrize(("count", "cuts"), [(67, (1, 2, 9, 14, 30, 31)), (130, (60, 61, 128))])
def test_logits_of_chunks_agree(pair: Pair, count: int, cuts: tuple[int, ...]) -> None:
    """Chunks are up-projected or absorbed, whichever costs less."""
    assert pair.distances(count, cuts).max() < 1e-4


def test_sequences_of_one_pass_are_as_each_alone(pair: Pair) -> None:
    prompts = [pair.ids(count) for count in (70, 1, 9)]
    with torch.no_grad():
        together = pair.ours.logits(pair.ours.one_pass(*prompts)).split([len(prompt) for prompt in prompts])
        for prompt, found in zip(prompts, together, strict=True):
            torch.testing.assert_close(found, pair.ours.logits(pair.ours.one_pass(prompt)), rtol=1e-4, atol=1e-4)


def test_absorbed_and_up_projected_models_agree(pair: Pair) -> None:
    """Deterministic models are always absorbed."""
    ids = pair.ids(130)
    absorbed = our_model(pair.theirs, pair.variant, plain(True))
    with torch.no_grad():
        first, other = (model.logits(model.one_pass(ids)) for model in (pair.ours, absorbed))
    assert 0 < (first - other).abs().max() < 1e-4


@pytest.mark.parametrize("variant", ["v2_lite", "v3", "v32"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_all_weights_agree(variant: str, deterministic: bool) -> None:
    make_pair(variant, deterministic=deterministic).check_gradients()


def test_mtp_block_agrees() -> None:
    """Their positions are one further, which changes no angle between two tokens."""
    from transformers.modeling_layers import MtpModel

    theirs = trainer_model("v3", num_nextn_predict_layers=1)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        block = MtpModel(theirs, 1).float().eval()
        with torch.no_grad():
            for name, tensor in (*block.layers.named_parameters(), *block.layers.named_buffers()):
                tensor.normal_(1.0, 0.3) if "norm" in name else tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
    raw = their_config(theirs, "v3")
    renamed = {"post_norm": "shared_head.norm"}
    own = {
        f"layers.3.{'.'.join(renamed.get(part, part) for part in name.split('.')[1:] if part != 'mtp_block')}": tensor
        for name, tensor in block.layers.state_dict().items()
    }
    ours = filled(parse_config(raw), plain(), official({**theirs.state_dict(), **own}, raw), with_mtp=True)
    ids = torch.randint(96, (41,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = theirs.model(ids[None, :-1], use_cache=False).last_hidden_state
        out = block.forward_layer(0, hidden, torch.arange(1, 41)[None], None, input_ids=ids[None, 1:])
        wanted = theirs.lm_head(out)[0]
        batch, caches = ours.prepare(ids[1:].tolist(), drafter=True)
        mine = ours.mtp_forward(ours.one_pass(ids[:-1].tolist()), batch, caches[-1])
    assert wanted.abs().max() > 1 and (ours.mtp_logits(mine) - wanted).abs().max() < 1e-4
    assert (mine - out[0]).abs().max() < 1e-4  # what a further draft begins with
