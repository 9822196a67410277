"""Parts of a download and the results between them, in the order in which they are loaded."""

from __future__ import annotations

from typing import cast

from weightgrad.core.site.shard import SiteShard
from weightgrad.runtime.site.server_link import LinkDownload
from weightgrad.wire.messages import ModelPart, ResultPart, RoundResult, Segment


class Shard:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load(self, vector: str, segment: Segment) -> None:
        self.loaded.append(f"{vector} {segment}")

    def load_result(self, result: RoundResult) -> None:
        self.loaded.append(f"result {result.version}")


def part(name: str, *, last: bool = False, version: int = 7) -> ModelPart:
    return ModelPart(vector="global_model", version=version, segments=(cast(Segment, name),), last=last)


def result(version: int, *, last: bool = True) -> ResultPart:
    return ResultPart(version=version, segments=(), last=last)


def load_all(download: LinkDownload) -> list[str]:
    shard = Shard()
    while download and not download.load_next(cast(SiteShard, shard)):
        pass
    return shard.loaded


def test_a_download_is_loaded_in_order_with_the_results_between_its_parts() -> None:
    download = LinkDownload()
    assert not download
    download.add_part(part("a"))
    download.add_result(result(8))
    complete = [download.complete]
    download.add_part(part("b", last=True))
    complete.append(download.complete)
    assert complete == [False, True]
    assert load_all(download) == ["global_model a", "result 8", "global_model b"]
    assert download.loaded == 8, "the result is in it already"
    assert not download.complete


def test_results_before_and_after_a_download_are_not_its_own() -> None:
    download = LinkDownload()
    download.add_result(result(6))
    assert not download
    download.add_part(part("a", last=True))
    download.add_result(result(8))
    assert load_all(download) == ["global_model a"]
    assert download.loaded == 7


def test_half_a_result_is_not_loaded_yet() -> None:
    download = LinkDownload()
    download.add_part(part("a"))
    download.add_result(result(9, last=False))
    load_all(download)
    assert download.loaded == -1


def test_what_a_process_sent_before_it_was_restarted_is_void() -> None:
    download = LinkDownload()
    download.add_part(part("a", last=True))
    load_all(download)
    download.add_part(part("b"))
    download.forget()
    assert not download
    assert download.loaded == -1
