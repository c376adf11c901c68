"""What an SGLang server was started with, and the flags that a run needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5.errors import EngineError
from glm5.model.replay import Stream
from glm5.rl.engines.http import Server
from glm5.rl.products import Products, serves_fp8
from glm5.rl.recorded import STREAMS, Recorded

FLAGS = {
    "enable_lora": "--enable-lora --max-lora-rank RANK --lora-target-modules ...",
    "enable_return_routed_experts": "--enable-return-routed-experts",
    "enable_return_indexer_topk": "--enable-return-indexer-topk",
}
_RECORD_KEYS: dict[Stream, str] = {
    "experts": "enable_return_routed_experts",
    "topk": "enable_return_indexer_topk",
}


class ServerArgs:
    """The arguments of a running server; one that a release does not know counts as not given."""

    def __init__(self, url: str, args: Mapping[str, Any]) -> None:
        self._url, self._args = url, args

    def is_on(self, key: str) -> bool:
        return self._args.get(key) is True

    def require(self, key: str) -> None:
        """Raises EngineError naming the flag that the server was started without."""
        if not self.is_on(key):
            raise EngineError(
                f"{self._url} was started without a flag that this run needs",
                got=f"{key} = {self._args.get(key, 'unknown to this release')}",
                expected=FLAGS[key],
                remedy="start the server again with it",
            )

    def require_record(self, recorded: Recorded) -> None:
        for stream in STREAMS[recorded]:
            self.require(_RECORD_KEYS[stream])

    @property
    def products(self) -> Products:
        """How linears multiply, by the server's arguments and its model's config.json."""
        named, is_fp8 = self._args.get("quantization"), serves_fp8(self._args.get("model_path"))
        if named not in (None, "fp8"):
            return "other"
        if is_fp8 is None:
            return "untold"
        # --quantization fp8 of unquantised weights is not in blocks
        return "fp8" if is_fp8 else "exact" if named is None else "other"

    @property
    def can_record(self) -> bool:
        """Whether any kind of choice; `require_record` asks for those of a run."""
        return any(self.is_on(key) for key in _RECORD_KEYS.values())


def read_server_args(server: Server) -> ServerArgs:
    """Asks a server that is up.

    Raises:
        EngineError: it does not answer, is not healthy, or is no SGLang server.
    """
    health = server.get("/health")
    if not health.is_ok:
        raise EngineError(
            f"{server.url} is not healthy",
            got=health.said(),
            remedy="look at the server's log",
        )
    answer = server.get("/server_info")
    if answer.status == 404:
        # its name in older releases
        answer = server.get("/get_server_info")
    if not answer.is_ok or not isinstance(answer.json, dict):
        raise EngineError(
            f"{server.url} does not tell how it was started",
            got=answer.said(),
            expected="/server_info of an SGLang server",
            remedy="is this an SGLang server?",
        )
    args = answer.json.get("server_args", answer.json)
    return ServerArgs(server.url, args if isinstance(args, dict) else {})
