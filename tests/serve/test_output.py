"""vLLM's output: passed through, kept, and never more than a bounded amount of it."""

from __future__ import annotations

import os
import pathlib
import threading

from dsv4_deploy.serve.output import Pump, RotatingFile, shift, write_all


def test_what_comes_in_is_in_the_file_and_on_the_other_side(tmp_path: pathlib.Path) -> None:
    reading, writing = os.pipe()
    out_reading, out_writing = os.pipe()
    file = RotatingFile(tmp_path / "vllm.log")
    pump = Pump(reading, file, out_writing)
    pump.start()
    write_all(writing, b"one\nt")
    write_all(writing, b"wo\n\xff\n")
    os.close(writing)
    pump.join(10)
    assert not pump.is_alive()
    file.close()
    os.close(out_writing)
    assert (tmp_path / "vllm.log").read_bytes() == b"one\ntwo\n\xff\n"
    assert os.read(out_reading, 100) == b"one\ntwo\n\xff\n"
    assert (tmp_path / "vllm.log").stat().st_mode & 0o777 == 0o600


def test_a_reader_that_has_gone_does_not_stop_the_log(tmp_path: pathlib.Path) -> None:
    reading, writing = os.pipe()
    out_reading, out_writing = os.pipe()
    os.close(out_reading)
    file = RotatingFile(tmp_path / "vllm.log")
    pump = Pump(reading, file, out_writing)
    pump.start()
    for number in range(100):
        write_all(writing, b"line %d\n" % number)
    os.close(writing)
    pump.join(10)
    os.close(out_writing)
    assert (tmp_path / "vllm.log").read_bytes().endswith(b"line 99\n")


def test_files_are_bounded_and_lines_stay_whole(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "vllm.log"
    file = RotatingFile(path, max_bytes=1000, keep=2)
    for number in range(1000):
        text = b"line %03d of the log\n" % number
        file.write(text[:7])
        file.write(text[7:])
    file.close()
    kept = [path.with_name("vllm.log.2"), path.with_name("vllm.log.1"), path]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert all(one.stat().st_size <= 1000 + 20 for one in kept)
    lines = b"".join(one.read_bytes() for one in kept).splitlines()
    assert lines == [b"line %03d of the log" % number for number in range(1000 - len(lines), 1000)]


def test_the_parts_of_this_run(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_bytes(b"the run before\n")
    file = RotatingFile(path, max_bytes=50)
    file.start_over()
    file.write(b"this run\n")
    assert file.parts() == [path]
    assert path.read_bytes() == b"this run\n"
    assert path.with_name("vllm.log.1").read_bytes() == b"the run before\n"
    for _ in range(6):
        file.write(b"a line of twenty bytes\n")
    parts = file.parts()
    assert len(parts) > 2
    assert parts[-1].read_bytes().startswith(b"this run\n")
    file.close()


def test_an_empty_log_is_not_kept_as_a_run(tmp_path: pathlib.Path) -> None:
    file = RotatingFile(tmp_path / "vllm.log")
    file.start_over()
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["vllm.log"]


def test_a_full_disk_costs_lines_not_the_server() -> None:
    file = RotatingFile(pathlib.Path("/dev/full"))
    file.write(b"nobody will read this\n")
    file.close()


def test_where_no_new_file_can_be_made_the_old_one_goes_on(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "vllm.log"
    file = RotatingFile(path, max_bytes=100, keep=2)
    path.unlink()
    path.mkdir()
    (path / "not empty").touch()
    path.with_name("vllm.log.1").mkdir()
    path.with_name("vllm.log.2").mkdir()
    (path.with_name("vllm.log.2") / "not empty").touch()
    for number in range(30):
        file.write(b"%050d\n" % number)
    assert file.parts() == [path], "nothing was rotated"
    file.close()


def test_shift_keeps_the_newest(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    for number in range(6):
        path.write_text(str(number))
        shift(path, keep=3)
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {
        "log.1": "5",
        "log.2": "4",
        "log.3": "3",
    }


def test_threads_do_not_mix_their_lines(tmp_path: pathlib.Path) -> None:
    file = RotatingFile(tmp_path / "vllm.log", max_bytes=5000, keep=20)

    def talk(name: bytes) -> None:
        for _ in range(200):
            file.write(name * 20 + b"\n")

    threads = [threading.Thread(target=talk, args=(name,)) for name in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    lines = [line for path in tmp_path.iterdir() for line in path.read_bytes().splitlines()]
    assert len(lines) == 600
    assert all(line in (b"a" * 20, b"b" * 20, b"c" * 20) for line in lines)
