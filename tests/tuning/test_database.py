from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sqlite3
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_sd.errors import InvalidOption, RocmSdError
from rocm_sd.tuning import database_file
from rocm_sd.tuning.database import Database, Entry, Quarantined
from rocm_sd.tuning.environment import Environment
from rocm_sd.tuning.resolve import preferred

HERE = Environment("gfx1100", 96, "amdgpu 6.10.5", "rocm 7.1.0", "2.11.0+rocm7.1", "3.6.0", "3005001")
THERE = replace(HERE, runtime="rocm 7.2.0")
PROBLEM = {"n": 2, "c": 320, "dtype": "float16", "layout": "channels_last"}
HASH = "0123456789abcdef"
SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")


def entry(median: float = 10.0, **named) -> Entry:
    given = {
        "op": "conv2d", "problem": PROBLEM, "environment": HERE, "kernel_hash": HASH, "candidate": "triton",
        "config": {"rows": 1}, "low_us": median * 0.9, "high_us": median * 1.1, "stock_us": 20.0, "numerics": "ok",
        "when": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return Entry(median_us=median, **{**given, **named})


@pytest.fixture
def path(tmp_path):
    database_file._say_once.cache_clear()
    return tmp_path / "cache" / "tuning.sqlite3"


@pytest.fixture
def database(path):
    opened = Database(path)
    yield opened
    opened.close()


def best(database: Database, **named) -> Entry | None:
    given = {"op": "conv2d", "problem": PROBLEM, "environment": HERE, "kernel_hash": HASH, **named}
    return database.best(**given)


def test_what_is_put_is_found_again_by_another_process_too(database, path):
    put = [entry(), entry(5.5, candidate="library_gemm", config={}, stock_us=None)]
    database.put(put)
    assert sorted(database.all(), key=lambda e: -e.median_us) == put
    with SPAWN.Pool(1) as pool:
        assert pool.apply(_best_of, (path,)) == put[1]


def _best_of(path: Path) -> Entry | None:
    return best(Database(path))


def test_questions_within_a_block_see_one_state_and_what_is_written_there_is_kept(database, path):
    first, second = entry(candidate="first"), entry(candidate="second")
    database.put([first])
    with database.reading(), database.reading():
        assert len(database.all()) == 1
        Database(path).put([second])
        assert len(database.all()) == 1, "another process writes, and the block has begun"
        database.put([entry(candidate="third")])
    assert {each.candidate for each in Database(path).all()} == {"first", "second", "third"}
    with pytest.raises(ZeroDivisionError), database.reading():
        _ = database.count() / 0
    assert database.count() == 3, "nothing is left open"


def test_damage_found_within_a_block_is_met_as_ever(database, path):
    database.put([entry()])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE measurements SET config = 'no JSON'")
    with database.reading():
        assert database.all() == ()
    assert database.why_lost() is not None
    database.put([entry()])
    assert database.count() == 1


def test_the_order_of_a_problem_does_not_matter(database):
    database.put([entry()])
    assert best(database, problem=dict(reversed(PROBLEM.items()))) == entry()


def test_the_best_is_the_fastest_that_is_right_and_not_set_aside(database):
    database.put(
        [
            entry(9.0, config={"rows": 1}),
            entry(3.0, config={"rows": 2}, numerics="at 2x320: largest error 3"),
            entry(float("inf"), config={"rows": 3}),
            entry(4.0, candidate="gemm_softmax", config={}),
            entry(8.0, candidate="torch", config={}, kernel_hash=""),
        ]
    )
    assert best(database).candidate == "gemm_softmax"
    database.quarantine("conv2d", "gemm_softmax", HERE, HASH, "NaN")
    assert best(database).candidate == "torch"
    assert best(database, among=("triton", "gemm_softmax")).median_us == 9.0
    assert len(database.all()) == 5


def test_what_others_were_measured_at_a_problem_is_distinguished(database):
    others = [entry(3.0, candidate="mine"), entry(4.0, candidate="mine", kernel_hash="2", numerics="wrong: nan")]
    elsewhere = [entry(candidate="mine", environment=THERE), entry(candidate="mine", problem={**PROBLEM, "n": 9})]
    database.put([entry(), *others, *elsewhere, entry(candidate="mine", op="geglu")])
    database.quarantine("conv2d", "mine", HERE, HASH, "NaN")
    found = database.by_others("conv2d", PROBLEM, HERE, ("torch", "triton"))
    assert sorted(found, key=lambda each: each.median_us) == others
    assert database.by_others("conv2d", PROBLEM, HERE, ("torch", "triton", "mine")) == ()


@pytest.mark.parametrize(
    "other",
    [
        {"environment": THERE},
        {"environment": replace(HERE, compute_units=48)},
        {"environment": replace(HERE, driver=None)},
        {"kernel_hash": "fedcba9876543210"},
        {"problem": {**PROBLEM, "n": 4}},
        {"problem": {**PROBLEM, "layout": "contiguous"}},
        {"op": "attention"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_measurement_of_anything_else_is_not_seen(database, other):
    database.put([entry()])
    assert best(database) == entry()
    assert best(database, **other) is None


def test_a_changed_kernel_makes_its_own_measurements_stale_and_leaves_the_library_alone(database):
    database.put([entry(5.0), entry(7.0, candidate="torch", config={}, kernel_hash="")])
    assert best(database).candidate == "triton"
    assert best(database, kernel_hash="fedcba9876543210").candidate == "torch"


def test_a_measurement_is_found_by_all_of_its_key(database):
    database.put([entry(float("nan"), numerics="it crashed")])
    asked = ("conv2d", PROBLEM, HERE, HASH, "triton", {"rows": 1})
    assert database.find(*asked).numerics == "it crashed"
    for number, other in enumerate(["attention", {"n": 1}, THERE, "", "torch", {"rows": 2}]):
        assert database.find(*asked[:number], other, *asked[number + 1 :]) is None


IN_KERNEL = replace(HERE, driver="amdgpu of Linux 6.8")
# The whole releases that keys had, and another series.
RELEASES = ("amdgpu of Linux 6.8.0-45-generic", "amdgpu of Linux 6.8.0-51-generic", "amdgpu of Linux 6.11.0-8-generic")


def _as_of_old(path: Path) -> None:
    """Measurements under three releases of the kernel, and the rest under the first of them."""
    old = [IN_KERNEL.key().replace(IN_KERNEL.driver, release) for release in RELEASES]
    database = Database(path)
    days = ("2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00", "2026-03-01T00:00:00+00:00")
    rows = [entry(10.0 + number, when=day).row() for number, day in enumerate(days)]
    database.put([entry(7.0, config={"rows": 4}, environment=IN_KERNEL)])
    database.close()
    connection = sqlite3.connect(path)
    # The newest first: what is met later must not replace it.
    for environment, row in reversed(list(zip(old, rows, strict=True))):
        put = f"INSERT INTO measurements VALUES ({', '.join('?' * 12)})"
        connection.execute(put, (*row[:2], environment, *row[3:]))
    key = ("conv2d", "hip", old[0], HASH)
    connection.execute("INSERT INTO quarantine VALUES (?, ?, ?, ?, 'wrong', ?)", (*key, days[0]))
    connection.execute("INSERT INTO self_tests VALUES (?, ?, ?, ?, 'float16', ?)", (*key, days[0]))
    connection.execute("INSERT INTO trials VALUES (?, ?, ?, ?, 'host', 1, ?)", (*key, days[0]))
    connection.commit()
    connection.close()


def _found_under_todays_key(database: Database) -> None:
    found = database.find("conv2d", PROBLEM, IN_KERNEL, HASH, "triton", {"rows": 1})
    # Of the two releases of the series the newer.
    assert (found.median_us, found.when[:10], found.environment) == (11.0, "2026-02-01", IN_KERNEL)
    assert best(database, environment=IN_KERNEL).median_us == 7.0
    assert database.why_quarantined("conv2d", "hip", IN_KERNEL, HASH) == "wrong"
    assert database.has_passed("conv2d", "hip", IN_KERNEL, HASH, "float16")
    later = replace(IN_KERNEL, driver="amdgpu of Linux 6.11")
    assert best(database, environment=later).median_us == 12.0
    assert (database.count(), database.count(IN_KERNEL), database.count(later)) == (3, 2, 1)


def test_what_was_stored_under_a_whole_release_of_the_kernel_is_found(path):
    _as_of_old(path)
    for _ in range(2):
        database = Database(path)
        _found_under_todays_key(database)
        database.close()
    with sqlite3.connect(path) as connection:
        kept = {
            row[0] for table in database_file._TABLES for row in connection.execute(f"SELECT environment FROM {table}")
        }
    assert not any("generic" in key for key in kept)


def test_a_key_of_another_form_is_left_as_it_is(path):
    _as_of_old(path)
    later = IN_KERNEL.key().replace("amdgpu of Linux 6.8", "amdgpu of Linux 6.8.0-45")[:-1] + ',"firmware":"3"}'
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE self_tests SET environment = ?", (later,))
    database = Database(path)
    assert best(database, environment=IN_KERNEL).median_us == 7.0
    database.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT environment FROM self_tests").fetchone()[0] == later


def test_a_file_that_cannot_be_written_is_read_under_todays_keys(path, monkeypatch):
    _as_of_old(path)
    opened = database_file.without_file(path, "it is locked")
    monkeypatch.setattr("rocm_sd.tuning.database.open_file", lambda _path: opened)
    _found_under_todays_key(Database(path))


def test_an_export_of_old_is_imported_under_todays_key(database, tmp_path):
    database.put([entry(environment=IN_KERNEL)])
    exported = tmp_path / "export.json"
    database.export_json(exported)
    exported.write_text(exported.read_text().replace(IN_KERNEL.driver, RELEASES[0]))
    other = Database(tmp_path / "other.sqlite3")
    other.import_json(exported)
    assert best(other, environment=IN_KERNEL) == entry(environment=IN_KERNEL)
    other.close()


@pytest.mark.parametrize("order", [1, -1])
def test_the_newer_measurement_is_kept(database, order):
    # The one of Tokyo is the older, though its text is the greater.
    older = entry(3.0, when="2026-03-01T05:00:00+09:00")
    newer = entry(12.0, when="2026-02-28T22:00:00Z")
    for one in [older, newer][::order]:
        database.put([one])
    assert database.all() == (newer,)


def test_several_processes_write_at_once_and_nothing_is_lost(path):
    with SPAWN.Pool(4) as pool:
        pool.starmap(_write_many, [(path, number) for number in range(4)])
    database = Database(path)
    assert database.count() == 4 * 50 + 1
    # All of them wrote this one, the last with the latest time.
    assert best(database, problem={"shared": 1}).median_us == 49.0
    assert len(database.quarantined()) == 4
    assert [p.name for p in path.parent.iterdir() if "aside" in p.name or "new" in p.name] == []


def _write_many(path: Path, number: int) -> None:
    database = Database(path)
    for turn in range(50):
        shared = entry(float(turn), problem={"shared": 1}, when=f"2026-01-01T00:00:{turn:02d}")
        database.put([entry(1.0, problem={"process": number, "turn": turn}), shared])
    database.quarantine("conv2d", f"candidate {number}", HERE, HASH, "NaN")


def test_a_process_that_is_killed_in_the_middle_of_writing_loses_nothing_that_was_committed(path):
    receive, send = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_write_for_ever, args=(path, send))
    process.start()
    send.close()
    written = [receive.recv() for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with suppress(EOFError):
        while receive.poll():
            written.append(receive.recv())
    database = Database(path)
    kept = {e.problem["turn"] for e in database.all()}
    assert set(written) <= kept
    # Whole transactions: of each turn both entries, or neither.
    assert database.count() == 2 * len(kept)
    database.put([entry()])
    assert best(database) == entry()


def _write_for_ever(path: Path, sender) -> None:
    database = Database(path)
    turn = 0
    while True:
        database.put([entry(problem={"turn": turn, "half": half}) for half in range(2)])
        sender.send(turn)
        turn += 1


def test_a_child_opens_the_file_for_itself(database):
    database.put([entry()])
    child = FORK.Process(target=_put_and_leave, args=(database,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert {e.problem.get("child") for e in database.all()} == {None, 1}


def _put_and_leave(database: Database) -> None:
    database.put([entry(problem={"child": 1})])


GARBAGE = b"this was never a database " * 400


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _scribbled(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)


def _foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
        other.execute("INSERT INTO bookmarks VALUES ('kept')")
    other.close()


@pytest.mark.parametrize(
    "spoil",
    [lambda path: path.write_bytes(GARBAGE), lambda path: path.write_bytes(b""), _truncated, _scribbled, _foreign],
    ids=["garbage", "empty", "truncated", "scribbled", "foreign"],
)
def test_a_corrupt_or_foreign_file_is_kept_aside_and_a_new_one_begun(path, caplog, spoil):
    before = Database(path)
    before.put([entry(problem={"turn": turn}) for turn in range(200)])
    before.close()
    spoil(path)
    content = path.read_bytes()
    database = Database(path)
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        assert best(database, problem={"turn": 3}) is None
        database.put([entry()])
    assert best(database) == entry()
    assert database.why_not_kept() is None
    (aside,) = [p for p in path.parent.iterdir() if ".aside-" in p.name and not p.name.endswith(("-wal", "-shm"))]
    assert aside.read_bytes() == content
    assert len(caplog.records) == 1
    assert aside.name in caplog.text


def test_a_row_that_cannot_be_read_is_damage_too(database, path):
    database.put([entry()])
    database._write("UPDATE measurements SET config = 'rows'", [()])
    assert best(database) is None
    assert [p for p in path.parent.iterdir() if ".aside-" in p.name]


def test_two_processes_that_meet_damage_set_it_aside_once(path):
    Database(path).put([entry()])
    first, second = Database(path), Database(path)
    path.with_name(path.name + "-wal").unlink(missing_ok=True)
    identity = database_file._identity(path)
    assert database_file.set_aside(path, identity, "damage")
    first.put([entry()])
    assert database_file.set_aside(path, identity, "damage")
    assert best(second) == entry()


def test_a_file_of_a_later_version_is_left_as_it_is_and_done_without(database, path, caplog):
    database.put([entry()])
    database._open().connection.execute("PRAGMA user_version = 2")
    database.close()
    content = path.read_bytes()
    older = Database(path)
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        assert best(older) is None
        older.put([entry(4.0)])
        assert best(older).median_us == 4.0
    assert "a later rocm-sd wrote it" in older.why_not_kept()
    assert len(caplog.records) == 1
    assert path.read_bytes() == content
    assert best(Database(path)) is None


def _as_nobody(what, *arguments) -> object:
    """In a child without a superuser's rights, for whom permissions count."""
    receive, send = FORK.Pipe(duplex=False)

    def run() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        send.send(what(*arguments))

    child = FORK.Process(target=run)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    return receive.recv()


def _read_and_try_to_write(path: Path) -> tuple[float, float, str]:
    database = Database(path)
    found = best(database).median_us
    database.put([entry(4.0, problem={"new": 1})])
    return found, best(database, problem={"new": 1}).median_us, database.why_not_kept()


def _reachable(path: Path) -> None:
    for folder in (path.parent, *path.parent.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o555)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_cannot_be_written_is_read_and_what_is_measured_lasts_as_long_as_the_process(path, what):
    database = Database(path)
    database.put([entry(7.0)])
    database.close()
    _reachable(path)
    path.chmod(0o444)
    path.parent.chmod(0o555 if what == "folder" else 0o777)
    found, new, why = _as_nobody(_read_and_try_to_write, path)
    assert (found, new) == (7.0, 4.0)
    assert why
    path.parent.chmod(0o755)
    path.chmod(0o644)
    again = Database(path)
    assert [e.median_us for e in again.all()] == [7.0]


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    database = Database(tmp_path / "file" / "tuning.sqlite3")
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        database.put([entry()])
        assert best(database) == entry()
        assert best(Database(database.path)) is None
    assert database.why_not_kept() is not None
    assert len(caplog.records) == 1


def test_a_full_disk_stops_nothing(database, path, caplog):
    database.put([entry()])
    connection = database._open().connection
    connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
    many = [entry(problem={"turn": turn}) for turn in range(500)]
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        database.put(many)
    assert database.count() == 501
    assert "full" in database.why_not_kept()
    assert len(caplog.records) == 1
    assert Database(path).all() == (entry(),)


names = st.sampled_from(["triton", "torch"])
entries = st.builds(
    entry,
    median=st.floats(0) | st.just(float("nan")),
    problem=st.dictionaries(st.sampled_from("mnk"), st.integers(0, 3) | st.text(max_size=3), max_size=2),
    environment=st.sampled_from([HERE, THERE]),
    candidate=names,
    stock_us=st.none() | st.floats(0, 100),
    numerics=st.sampled_from(["ok", "wrong"]),
    # What is dated in the future is not taken in.
    when=st.datetimes(max_value=datetime(2026, 1, 1)).map(lambda when: when.isoformat()),  # noqa: DTZ001 -- of no zone
)
contents = st.tuples(st.lists(entries, max_size=6), st.lists(st.tuples(names, st.text(max_size=5)), max_size=2))


@pytest.fixture(scope="module")
def four_databases(tmp_path_factory):
    """Made once: a file of its own for each of a hundred takes longer than all that is asked of them."""
    folder = tmp_path_factory.mktemp("merge")
    databases = tuple(Database(folder / name) for name in ("one", "two", "imported", "merged"))
    yield databases
    for database in databases:
        database.close()


@settings(max_examples=25)
@given(first=contents, second=contents)
def test_export_import_and_merge_agree_in_any_order(four_databases, first, second):
    one, two, imported, merged = four_databases
    folder = one.path.parent
    for database in four_databases:
        for table in ("measurements", "quarantine"):
            database._write(f"DELETE FROM {table}", [()])
    for database, (measured, quarantined) in ((one, first), (two, second)):
        database.put(measured)
        for candidate, reason in quarantined:
            database.quarantine("conv2d", candidate, HERE, HASH, reason)
    for database, name in ((one, "one.json"), (two, "two.json")):
        # An export with more in it would not be replaced.
        (folder / name).unlink(missing_ok=True)
        database.export_json(folder / name)
    for name in ("one.json", "two.json", "one.json"):
        imported.import_json(folder / name)
    for database in (two, one):
        merged.merge(database)
    assert imported.all() == merged.all()
    assert imported.quarantined() == merged.quarantined()
    # Nothing is made up, and of every key the newest is there.
    newest = {}
    for found in sorted((*one.all(), *two.all()), key=lambda e: e.when):
        newest[found.row()[:6]] = found.when
    assert {found.row()[:6]: found.when for found in merged.all()} == newest


def test_an_export_is_plain_json(database, tmp_path):
    database.put([entry(float("inf"), numerics="it hangs")])
    database.quarantine("conv2d", "triton", HERE, HASH, "NaN")
    database.passed("conv2d", "triton", HERE, HASH, "float16")
    assert database.export_json(tmp_path / "out.json") == 2
    content = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert content["measurements"][0]["environment"]["arch"] == "gfx1100"
    assert content["measurements"][0]["median_us"] is None
    assert content["quarantine"][0]["reason"] == "NaN"
    assert "self_tests" not in content


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content.pop("version"),
        lambda content: content.update(version=2),
        lambda content: content["measurements"][1].pop("numerics"),
        lambda content: content["measurements"][1].update(median_us="fast"),
        lambda content: content["measurements"][1].update(median_us=-1.0),
        lambda content: content["measurements"][1].update(config={"rows": "rm -rf"}),
        lambda content: content["measurements"][1].update(when="yesterday"),
        lambda content: content["measurements"][1].update(environment={"arch": "gfx1100"}),
        lambda content: content["quarantine"].append("triton"),
    ],
)
def test_an_import_is_whole_or_not_at_all(database, tmp_path, spoil):
    source, file = Database(tmp_path / "source"), tmp_path / "out.json"
    source.put([entry(), entry(candidate="torch")])
    source.export_json(file)
    content = json.loads(file.read_text())
    spoil(content)
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidOption, match="not what an export"):
        database.import_json(file)
    assert database.count() == 0


def ahead(**by) -> str:
    return (datetime.now(timezone.utc) + timedelta(**by)).isoformat()


def test_an_import_of_the_future_is_refused_with_its_count(database, tmp_path):
    source, file = Database(tmp_path / "source"), tmp_path / "out.json"
    source.put([entry(), entry(candidate="torch", when=ahead(hours=2)), entry(op="geglu", when="9999-12-31T23:59:59")])
    source.export_json(file)
    with pytest.raises(InvalidOption, match="2 of its 3 entries are dated in the future, up to 9999-12-31"):
        database.import_json(file)
    assert database.count() == 0


def test_a_clock_that_is_a_little_ahead_is_none_of_the_future_and_a_fresh_measurement_wins(database, tmp_path):
    source, file = Database(tmp_path / "source"), tmp_path / "out.json"
    source.put([entry(1.0, when=ahead(minutes=50))])
    source.export_json(file)
    assert database.import_json(file) == 1
    assert best(database).when <= ahead()
    database.put([entry(7.0, when=ahead())])
    assert best(database).median_us == 7.0


def test_what_a_wrong_clock_dated_gives_way_to_what_is_measured_now(database):
    database.put([entry(1.0, when="2099-01-01T00:00:00")])
    database.put([entry(7.0, when=ahead())])
    assert best(database).median_us == 7.0


@pytest.mark.parametrize("when", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-13-01", "", "\u0663"])
def test_a_date_out_of_range_is_no_time(database, tmp_path, when):
    source, file = Database(tmp_path / "source"), tmp_path / "out.json"
    source.put([entry()])
    source.export_json(file)
    content = json.loads(file.read_text())
    content["measurements"][0]["when"] = when
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidOption, match="is no time"):
        database.import_json(file)


def test_an_export_of_damage_that_shows_in_the_middle_leaves_the_backup(database, path, tmp_path):
    backup = tmp_path / "backup.json"
    database.put([entry(problem={"turn": turn}) for turn in range(400)])
    database.export_json(backup)
    content = backup.read_bytes()
    database.close()
    _scribbled(path)
    with pytest.raises(RocmSdError, match="cannot be read"):
        Database(path).export_json(backup)
    assert backup.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(version=2, tomorrow=[]),
        lambda content: content["measurements"][0].update(when="2999-01-01T00:00:00+00:00"),
        lambda content: content["measurements"][0].update(op=7),
    ],
    ids=["of a later version", "of a clock ahead", "damaged"],
)
def test_a_backup_that_cannot_be_read_here_is_not_written_over(database, tmp_path, change):
    backup = tmp_path / "backup.json"
    database.put([entry()])
    database.export_json(backup)
    content = json.loads(backup.read_text())
    change(content)
    backup.write_text(json.dumps(content))
    before = backup.read_bytes()
    with pytest.raises(RocmSdError, match="cannot be read here, and is left as it is"):
        database.export_json(backup)
    assert backup.read_bytes() == before


def test_a_stock_time_of_nothing_is_no_division_by_zero(database):
    (kept,) = [entry(1.0, stock_us=0.0)]
    assert preferred(kept, entry(candidate="torch")) is kept


def test_what_is_set_aside_keeps_its_first_reason_until_it_is_released(database):
    database.quarantine("conv2d", "triton", HERE, HASH, "NaN")
    database.quarantine("conv2d", "triton", HERE, HASH, "later")
    (one,) = database.quarantined(HERE)
    assert isinstance(one, Quarantined)
    assert (one.op, one.candidate, one.environment, one.reason) == ("conv2d", "triton", HERE, "NaN")
    assert database.quarantined(THERE) == ()
    assert database.why_quarantined("conv2d", "triton", HERE, HASH) == "NaN"
    assert database.why_quarantined("conv2d", "triton", HERE, "fedcba9876543210") is None
    assert database.release("conv2d", "triton") == 1
    assert database.quarantined() == ()


def test_a_process_that_dies_in_a_self_test_is_counted_and_one_that_lives_is_not(database, path):
    key = ("conv2d", "triton", HERE, HASH)
    for _ in range(2):
        child = FORK.Process(target=_die_in_a_trial, args=(path, key))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    other = SPAWN.Process(target=_linger_in_a_trial, args=(path, key))
    other.start()
    deadline = time.monotonic() + 20
    while len(database._ask("SELECT pid FROM trials", (), tuple)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert database.begin_trial(*key) == 2
    other.kill()
    other.join()
    database.end_trial(*key)
    assert database.begin_trial(*key) == 0


def _die_in_a_trial(path: Path, key) -> None:
    Database(path).begin_trial(*key)
    os.kill(os.getpid(), signal.SIGKILL)


def _linger_in_a_trial(path: Path, key) -> None:
    Database(path).begin_trial(*key)
    time.sleep(30)
