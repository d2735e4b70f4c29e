"""What `tests.compositions` keeps for the other tests is what Hydra composes for users."""

from __future__ import annotations

import pytest

from parallelrun.cli import argv
from parallelrun.config import compose
from tests.compositions import compose_as_ever


def composed(*words: str) -> compose.Composed:
    return compose.compose_once(compose.prepare(argv.read(["plan", *words]).overrides, (), "plan", False))[0]


LINES = (
    ("model=gpt", "strategy=ptdp", "dp=2", "tp=2"),
    ("model=gpt", "strategy=ptdp", "dp=2", "tp=4", "optimizer.betas=[0.1,0.2]"),
    ("model=gpt", "strategy=ddp", "dp=2", "cluster=a100_dgx"),
    ("model=moe_gpt", "strategy=gshard", "dp=2", "hydra.job.name=mine", "name='${hydra:job.name}'"),
    ("recipe=quickstart", "dp=1"),
    ("model=gpt", "optimizer=sgd", "dp=2", "tp=2"),
    ("recipe=gpt2_124m", "model.layers=3"),
)


@pytest.mark.slow
def test_what_is_kept_is_what_users_get():
    """In any order, also the second time, and whatever is changed in between."""
    with pytest.MonkeyPatch.context() as patch:
        compose_as_ever(patch)
        ever = [composed(*words) for words in LINES]
    for words, one in [*zip(LINES, ever), *zip(LINES[::-1], ever[::-1])]:
        again = composed(*words)
        assert again == one, words
        again.config.model.layers, again.config.tp = 77, 78


def test_a_cluster_of_the_users_own_is_seen_when_it_is_there_and_when_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLELRUN_CONFIG", str(tmp_path))
    words = ("model=gpt", "strategy=ddp", "dp=2", "cluster=mine")
    with pytest.raises(Exception, match="mine"):
        composed(*words)
    file = tmp_path / "cluster" / "mine.yaml"
    file.parent.mkdir()
    for rate in (10.0, 20.0):
        file.write_text(f"name: mine\nintra_gb_s: {rate}\n")
        assert composed(*words).config.cluster.intra_gb_s == rate
    file.unlink()
    with pytest.raises(Exception, match="mine"):
        composed(*words)
