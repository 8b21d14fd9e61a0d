"""The forms of tests/distributed/test_interchange.py on CUDA, reading what a CPU wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import tiny
from tests.helpers.interchange import all_forms, contents, read_and_write, write_canonical


@pytest.mark.timeout(900)
def test_every_form_on_cuda_reads_a_cpus_folder_and_writes_it_again_byte_for_byte(
    tmp_path: Path,
) -> None:
    model = tiny.write_model(tmp_path / "model")
    write_canonical(tmp_path, model)
    forms = all_forms(1, device="cuda")
    read_and_write(0, forms, model, tmp_path)
    for form in forms:
        found = contents(tmp_path / str(form) / "step_1")
        assert found == contents(tmp_path / form.method / "step_1"), form
