"""Coverage-guided fuzzing of the store for hours: `make fuzz`.

    python -m tests.fuzz_store calls|layout|segment|journal [options of libFuzzer]

Runs a property of the tests with inputs that a fuzzer chooses by what they reach. What fails is
printed as the test would print it.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["asyncflow_store_zmq", "asyncflow_core.ledger"]):
    from tests import test_garbled, test_hostile

PROPERTIES = {
    "calls": test_hostile.test_calls_of_any_form_change_nothing_for_others,
    "layout": test_garbled.test_layout_of_any_bytes_is_a_layout_or_a_data_error,
    "segment": test_garbled.test_garbled_segment_is_read_or_refused_in_words,
    "journal": test_garbled.test_journal_with_any_byte_changed_is_refused_by_file_and_offset,
}


def main() -> None:
    name = sys.argv.pop(1)
    logging.disable(logging.CRITICAL)
    fuzz_one = PROPERTIES[name].hypothesis.fuzz_one_input
    atheris.Setup(sys.argv, lambda data: fuzz_one(data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
