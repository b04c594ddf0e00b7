"""The document lists what the suite tests, and nothing else."""

from tests.workflow.conftest import BEGIN, DOC, END
from tests.workflow.faults import FAULTS, table


def test_document_lists_every_fault_and_what_happens():
    rows = DOC.read_text().split(BEGIN)[1].split(END)[0].splitlines()[2:]
    expected = table(dict.fromkeys([fault.name for fault in FAULTS])).splitlines()[2:]

    def without_times(line):
        return [cell.strip() for at, cell in enumerate(line.strip("|").split("|")) if at != 1]

    assert [without_times(row) for row in rows] == [without_times(row) for row in expected]


def test_faults_have_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
