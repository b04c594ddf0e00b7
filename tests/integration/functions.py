"""Stages and rewards of the integration tests, by `module:name`."""

import itertools
import os
import threading
import time

import numpy as np

from asyncflow_core.parts import group_index


def next_letter(response: str, prompt: str) -> float:
    """1 for the letter after the prompt's last one."""
    return float(response == chr((ord(prompt[-1]) - ord("a") + 1) % 26 + ord("a")))


def raises(response: str) -> float:
    raise ValueError(f"cannot judge {response!r}")


def raises_for_c(response: str, prompt: str) -> float:
    """Raises for the prompt c."""
    return raises(response) if prompt == "c" else next_letter(response, prompt)


def centred(batch):
    """Rewards minus their group's mean, a value a token."""
    groups, rewards = group_index(batch), np.asarray(batch["reward"].array, np.float64)
    means = np.bincount(groups, rewards) / np.bincount(groups)
    lengths = batch["response_ids"].lengths
    return {"advantages": [[a] * n for a, n in zip(rewards - means[groups], lengths, strict=True)]}


def wrong_columns(batch):
    return {"nonsense": [0] * batch.rows}


def low_letter(response: str) -> float:
    """1 for a, 0 for z."""
    return (ord("z") - ord(response)) / 25


def never_for_c(response: str, prompt: str) -> float:
    """Does not return for the prompt c."""
    if prompt == "c":
        os.write(1, b"now: never\n")
        threading.Event().wait()
    return next_letter(response, prompt)


def native_for_c(response: str, prompt: str) -> float:
    """Holds the GIL for ever for the prompt c: no thread, no signal handler of Python runs."""
    if prompt == "c":
        os.write(1, b"now: native\n")
        sum(itertools.repeat(0))
    return next_letter(response, prompt)


def ends_for_c(response: str, prompt: str) -> float:
    """Takes its process with it for the prompt c."""
    if prompt == "c":
        os.write(1, b"now: ends\n")
        os._exit(3)
    return next_letter(response, prompt)


def slow(response: str, prompt: str) -> float:
    time.sleep(0.02)
    return next_letter(response, prompt)


def shorter(response: str) -> float:
    """1 for no letter, 0 for many."""
    return 1.0 / (1 + len(response))


def early_letter(response: str) -> float:
    """1 for the first half of the alphabet, or no letter."""
    return float(response < "n")


def judged(batch, model):
    """A verdict a row, by a model that answers."""
    answers = model.generate(["a"] * batch.rows)
    assert all(len(answer) == 2 for answer in answers)
    return {"verdict": answers}


def slow_for_xyz(response: str, prompt: str) -> float:
    """Takes its time for the prompts x, y and z."""
    if prompt in "xyz":
        time.sleep(0.4)
    return next_letter(response, prompt)
