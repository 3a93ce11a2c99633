from pathlib import Path

import pytest

from lightning_3d import doctor
from lightning_3d.doctor import facts
from lightning_3d.doctor.checks import check_all
from lightning_3d.doctor.findings import Level, note, ok, problem, table


@pytest.mark.parametrize(("text", "number"), [("1024\n", 1024), ("max\n", None), (None, None)])
def test_number_of_a_cgroup_file(tmp_path: Path, text: str | None, number: int | None) -> None:
    path = tmp_path / "memory.max"
    if text is not None:
        path.write_text(text)
    assert facts.read_number(path) == number


def test_meminfo_is_read_in_bytes() -> None:
    text = "MemTotal:       2048 kB\nMemAvailable:   1024 kB\nHugePages_Total:       0\n"
    assert facts.read_meminfo(text) == {"MemTotal": 2048 * 1024, "MemAvailable": 1024 * 1024}


def test_place_that_does_not_exist_yet_is_judged_by_the_folder_above(tmp_path: Path) -> None:
    place = facts.look_at_place("runs", tmp_path / "logs" / "runs")
    assert place.writable
    assert place.free > 0
    assert list(tmp_path.iterdir()) == []


def test_place_that_refuses_files_is_not_writable() -> None:
    assert not facts.look_at_place("kernel", Path("/proc/self")).writable


def test_every_check_runs_on_this_machine() -> None:
    findings = check_all(facts.gather())
    assert len(findings) > 15
    assert any(finding.what.startswith("torch ") and finding.level is not Level.PROBLEM for finding in findings)


def test_table_puts_the_fix_under_its_finding() -> None:
    assert table([ok("a"), note("b", "mend b"), problem("c", "mend c")]).splitlines() == [
        "ok       a",
        "note     b",
        "           fix: mend b",
        "problem  c",
        "           fix: mend c",
        "",
        "1 ok, 1 note, 1 problem",
    ]


@pytest.mark.parametrize(("findings", "code"), [([ok("a"), note("b")], 0), ([ok("a"), problem("c", "mend")], 1)])
def test_exit_code_is_1_for_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], findings: list[doctor.Finding], code: int
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: None)
    monkeypatch.setattr(doctor, "check_all", lambda _: findings)
    assert doctor.run([]) == code
    assert "ok       a" in capsys.readouterr().out


@pytest.mark.parametrize("launched", [{"RANK": "1"}, {"SLURM_PROCID": "1"}])
def test_one_process_of_a_launcher_prints(
    launched: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "gather", lambda: None)
    monkeypatch.setattr(doctor, "check_all", lambda _: [ok("a")])
    assert doctor.run([]) == 0
    assert capsys.readouterr().out == ""
