"""The place in the prompts."""

from itertools import pairwise

import pytest

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.flow.running.assigned import TRAINING
from asyncflow_core.flow.running.cursor import PromptCursor, fingerprint
from asyncflow_core.parts import PromptRecord


class Prompts:
    """As many prompts an epoch as told, each of its own."""

    def __init__(self, *counts):
        self.counts = counts

    def train(self, epoch):
        count = self.counts[min(epoch, len(self.counts) - 1)]
        return iter([PromptRecord([epoch, sequence]) for sequence in range(count)])


def test_cursor_resumed_anywhere_goes_on_where_it_was():
    whole = PromptCursor(Prompts(3), "p").draw(10)
    assert [tuple(key[1:]) for key, _ in whole[:4]] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    for drawn, (before, after) in enumerate(pairwise(whole), 1):
        at, last = (before[0].epoch, before[0].sequence + 1), fingerprint(before[1].prompt_ids)
        rest = PromptCursor(Prompts(3), "p", at=at, last=last).draw(10 - drawn)
        assert rest == whole[drawn:]
        assert rest[0] == after


def test_cursor_brings_back_what_was_drawn():
    whole = dict(PromptCursor(Prompts(3), "p").draw(9))
    keys = list(whole)
    cursor = PromptCursor(Prompts(3), "p", at=(3, 0))
    assert cursor.again([keys[7], keys[1], keys[2]]) == {k: whole[k] for k in [*keys[1:3], keys[7]]}
    assert cursor.again([]) == {}


@pytest.mark.parametrize(
    ("prompts", "at", "last", "said"),
    [
        (Prompts(3), (0, 2), "another", "prompt 1 of epoch 0 differs"),
        (Prompts(3), (0, 7), "", "epoch 0 has 3 prompts"),
    ],
)
def test_cursor_other_prompts_are_refused(prompts, at, last, said):
    with pytest.raises(ConfigError, match=f"not those that the run began with.*{said}"):
        PromptCursor(prompts, "p", at=at, last=last).draw(1)
    keys = [GroupKey(TRAINING, 0, at[1] - 1)]
    with pytest.raises(ConfigError, match="not those that the run began with"):
        PromptCursor(prompts, "p", at=at, last=last).again(keys)


def test_cursor_at_the_end_of_an_epoch_begins_the_next():
    assert PromptCursor(Prompts(3), "p", at=(0, 3)).draw(1)[0][0] == GroupKey(TRAINING, 1, 0)
    with pytest.raises(DataError, match="no training prompts in epoch 1"):
        PromptCursor(Prompts(3, 0), "p", at=(0, 3)).draw(1)
