"""Generations: a start reuses the saved one or begins a new one, and removes the logs of all others."""

from __future__ import annotations

from tests.crash_files import CrashFiles

from timeball.schedule import generations

FOLDER = "wheel"


def logs(files: CrashFiles, generation: int) -> list[str]:
    return files.list_dir(f"{generations.folder_of(FOLDER, generation)}/links")


def write(files: CrashFiles, generation: int) -> None:
    folder = f"{generations.folder_of(FOLDER, generation)}/links"
    files.make_dir(folder)
    files.create(f"{folder}/00000000.log").write_at(0, b"links")


def test_saved_generation_is_used_again_and_others_are_removed() -> None:
    files = CrashFiles()
    for generation in (3, 4):
        write(files, generation)
    files.create(f"{FOLDER}/ring")
    assert generations.begin_generation(files, FOLDER, 3) == 3
    assert (logs(files, 3), logs(files, 4)) == (["00000000.log"], [])
    assert files.exists(f"{FOLDER}/ring")


def test_without_a_saved_generation_a_new_number_is_used_and_others_are_removed() -> None:
    files = CrashFiles()
    assert generations.begin_generation(files, FOLDER, None) == 1
    write(files, 1)
    assert generations.begin_generation(files, FOLDER, None) == 2
    assert logs(files, 1) == []
    assert generations.begin_generation(files.crash(1), FOLDER, None) == 3
