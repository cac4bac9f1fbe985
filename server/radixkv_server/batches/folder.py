# SPDX-License-Identifier: Apache-2.0
"""BatchFolder: tenants' files and batches on disk, which servers of one response store share.

    FOLDER/lock, FOLDER/worker              locks: of a change, and of the one server that works on batches
    FOLDER/t-TENANT/file-ID                 a file's bytes
    FOLDER/t-TENANT/file-ID.json            its object in the API
    FOLDER/t-TENANT/batch_ID.json           a batch: {"batch": its object in the API, "is_admin"}
    FOLDER/t-TENANT/batch_ID.unfinished     an empty file, while it is
    FOLDER/t-TENANT/batch_ID.answers        answers so far, in the form of `OutputFile`

Its calls block, each for a few reads and writes of small files but where they say so.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

from radixkv.errors import ConfigError
from radixkv_server.batches.lines import BatchLimits, is_failure
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError
from radixkv_server.tenants.tenant import Tenant

#: States of a batch that has not ended.
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
#: Most ended batches of a tenant that are kept, the latest.
MAX_ENDED = 1000
_MARK = ".unfinished"
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch in the folder.

    Attributes:
        tenant: in whose name its lines are asked.
        batch: its object in the API.
    """

    tenant: Tenant
    batch: Json


class BatchFolder:
    """Files and batches by tenant.

    Args:
        path: the folder, made by `open` if it is missing; None: one of this process, removed by `close`.
    """

    def __init__(self, path: str | None, limits: BatchLimits) -> None:
        self._limits = limits
        self._given = path
        self._thread_lock = threading.Lock()  # a process has its lock of a file once, for all its threads
        self._lock = self._worker = -1

    def open(self) -> None:
        """Make the folder's missing parts; before any other call.

        Raises:
            ConfigError: it can't be made.
        """
        path = self._given
        try:
            self._path = Path(tempfile.mkdtemp(prefix="radixkv-batches-") if path is None else path)
            self._path.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            self._worker = os.open(self._path / "worker", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"the folder {path} of files and batches: {error.strerror or error}") from error

    # ------------------------------------------------------------------ files

    def add_file(self, tenant: str, source: IO[bytes], filename: str, purpose: str) -> Json:
        """Keep a copy of a file, which may take long.

        Raises:
            ApiError: 429; the tenant has as many as it may.
        """
        if len(self.files(tenant)) >= self._limits.max_files:
            message = f"You have {self._limits.max_files} files (max_files): delete one."
            raise ApiError(429, message, code="too_many_files")
        file_id = f"file-{_new_hex()}"
        path = self._make_place(tenant) / file_id
        with path.open("xb") as kept:
            shutil.copyfileobj(source, kept, 1024 * 1024)
        return self._describe(tenant, file_id, filename, purpose)

    def _describe(self, tenant: str, file_id: str, filename: str, purpose: str) -> Json:
        path = self._place(tenant) / file_id
        described = {
            "id": file_id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": int(time.time()),
            "expires_at": None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        _write(path.with_name(f"{file_id}.json"), described)
        return described

    def file(self, tenant: str, file_id: str, param: str | None = None) -> tuple[Path, Json]:
        """Return the path of a tenant's file and its object.

        Raises:
            ApiError: 404; there is none.
        """
        path = self._place(tenant) / file_id
        found = _read(path.with_name(f"{file_id}.json")) if _ID.fullmatch(file_id) else None
        if found is None or found.get("object") != "file":
            raise _not_found("file", file_id, param)
        return path, found

    def files(self, tenant: str) -> list[Json]:
        """Return the tenant's files, the latest first."""
        return self._objects(tenant, "file-")

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Forget a file.

        Raises:
            ApiError: 404; there is none. 409; an unfinished batch reads it.
        """
        with self._changing():
            path, _ = self.file(tenant, file_id)
            for one in self.batches(tenant):
                if one["input_file_id"] == file_id and one["status"] in UNFINISHED:
                    message = f"The batch {one['id']} reads this file: wait for its end, or cancel it."
                    raise ApiError(409, message, code="file_in_use")
            path.with_name(f"{file_id}.json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ batches

    def add_batch(self, tenant: Tenant, asked: Mapping[str, Any], window_s: float) -> Json:
        """Keep a new batch, to be worked on.

        Args:
            asked: endpoint, input_file_id, completion_window and metadata.
            window_s: seconds that it may take.

        Raises:
            ApiError: 404; there is no such file. 400; it is none of requests. 429; the tenant has as many
                unfinished batches as it may.
        """
        name = tenant.name
        with self._changing():
            _, file = self.file(name, asked["input_file_id"], "input_file_id")
            if file["purpose"] != "batch":
                message = f"Its purpose is {file['purpose']}: upload requests with purpose batch."
                raise ApiError(400, message, param="input_file_id", code="invalid_purpose")
            own = self.batches(name)
            most = self._limits.max_batches
            if sum(one["status"] in UNFINISHED for one in own) >= most:
                message = f"You have {most} unfinished batches (max_batches): wait for one, or cancel one."
                raise ApiError(429, message, code="too_many_batches", headers={"Retry-After": "60"})
            now = int(time.time())
            times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
            batch = {
                "id": f"batch_{_new_hex()}",
                "object": "batch",
                **asked,
                "errors": None,
                "status": "validating",
                "output_file_id": None,
                "error_file_id": None,
                "created_at": now,
                "expires_at": now + int(window_s),
                **{f"{time_of}_at": None for time_of in times},
                "request_counts": {"total": 0, "completed": 0, "failed": 0},
            }
            self._write_batch(StoredBatch(tenant, batch), self._make_place(name))
            for old in [one for one in own if one["status"] not in UNFINISHED][MAX_ENDED:]:
                (self._place(name) / f"{old['id']}.json").unlink(missing_ok=True)
        return batch

    def batch(self, tenant: str, batch_id: str) -> Json:
        """Return a tenant's batch.

        Raises:
            ApiError: 404; there is none.
        """
        return self._stored(tenant, batch_id).batch

    def batches(self, tenant: str) -> list[Json]:
        """Return the tenant's batches, the latest first."""
        return [one["batch"] for one in self._objects(tenant, "batch_")]

    def unfinished(self) -> StoredBatch | None:
        """Return the oldest unfinished batch of all tenants; O(unfinished batches)."""
        for mark in sorted(self._path.glob(f"t-*/batch_*{_MARK}"), key=lambda path: path.name):
            try:
                stored = self._stored(unquote(mark.parent.name[2:]), mark.stem)
            except ApiError:  # the process ended before it was written
                continue
            if stored.batch["status"] in UNFINISHED:
                return stored
        return None

    def cancel(self, tenant: str, batch_id: str) -> Json:
        """Let a batch end; one that has ended stays as it is.

        Raises:
            ApiError: 404; there is none. 409; it has ended.
        """

        def change(batch: Json) -> None:
            if batch["status"] not in UNFINISHED:
                message = f"The batch {batch_id} is {batch['status']}, and can't be cancelled."
                raise ApiError(409, message, code="batch_has_ended")
            if batch["status"] in ("validating", "in_progress"):
                batch |= {"status": "cancelling", "cancelling_at": int(time.time())}

        return self.update(tenant, batch_id, change)

    def update(self, tenant: str, batch_id: str, change: Callable[[Json], None]) -> Json:
        """Change a batch in place; an error leaves it as it is.

        Raises:
            ApiError: 404; there is none.
        """
        with self._changing():
            stored = self._stored(tenant, batch_id)
            change(stored.batch)
            self._write_batch(stored, self._place(tenant))
        return stored.batch

    def answers_path(self, tenant: str, batch_id: str) -> Path:
        """Return the path of a batch's answers so far."""
        return self._place(tenant) / f"{batch_id}.answers"

    def give_out(self, tenant: str, batch: Json) -> dict[str, str]:
        """Make the files of answers and of failures, where there are any; may take long.

        Their names follow from the batch's, so that a server that was killed here makes the same once more.

        Returns:
            `output_file_id` and `error_file_id`, as far as there are any.
        """
        answers, made = self.answers_path(tenant, batch["id"]), {}
        if not answers.exists():
            return {}
        for kind, failed in (("output", False), ("error", True)):
            file_id = "file-" + uuid.uuid5(uuid.NAMESPACE_URL, f"{batch['id']}/{kind}").hex
            path, size = self._place(tenant) / file_id, 0
            with answers.open("rb") as source, path.open("wb") as kept:
                for line in source:
                    if is_failure(json.loads(line)) is failed:
                        size += kept.write(line)
            if size:
                self._describe(tenant, file_id, f"{batch['id']}_{kind}.jsonl", "batch_output")
                made[f"{kind}_file_id"] = file_id
            else:
                path.unlink()
        return made

    # ------------------------------------------------------------------ the folder

    def try_to_work(self) -> bool:
        """Become the one server that works on batches, until `close`; False: another one does."""
        try:
            fcntl.lockf(self._worker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Give up the locks, and remove a folder of this process's own."""
        for descriptor in (self._lock, self._worker):
            os.close(descriptor)
        if self._given is None:
            shutil.rmtree(self._path, ignore_errors=True)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._thread_lock:
            fcntl.lockf(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def _place(self, tenant: str) -> Path:
        return self._path / f"t-{quote(tenant, safe='')}"

    def _make_place(self, tenant: str) -> Path:
        place = self._place(tenant)
        place.mkdir(mode=0o700, exist_ok=True)
        return place

    def _objects(self, tenant: str, prefix: str) -> list[Json]:
        found = [one for path in self._place(tenant).glob(f"{prefix}*.json") if (one := _read(path))]
        return sorted(found, key=_age, reverse=True)

    def _stored(self, tenant: str, batch_id: str) -> StoredBatch:
        found = _read(self._place(tenant) / f"{batch_id}.json") if _ID.fullmatch(batch_id) else None
        if found is None or "batch" not in found:
            raise _not_found("batch", batch_id, None)
        return StoredBatch(_tenant(tenant, found), found["batch"])

    def _write_batch(self, stored: StoredBatch, place: Path) -> None:
        record = {"batch": stored.batch, "is_admin": stored.tenant.is_admin}
        mark = place / f"{stored.batch['id']}{_MARK}"
        if stored.batch["status"] in UNFINISHED:
            mark.touch()
        _write(place / f"{stored.batch['id']}.json", record)
        if stored.batch["status"] not in UNFINISHED:
            mark.unlink(missing_ok=True)


def _new_hex() -> str:
    """Make an id's part of 32 hex digits that sorts by time."""
    return f"{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


def _tenant(name: str, record: Json) -> Tenant:
    return Tenant(name, "admin" if record["is_admin"] else "user")


def _age(record: Json) -> tuple[int, str]:
    one = record.get("batch", record)
    return one["created_at"], one["id"]


def _not_found(what: str, name: str, param: str | None) -> ApiError:
    return ApiError(404, f"There is no {what} {name[:100]!r}.", param=param, code=f"{what}_not_found")


def _read(path: Path) -> Json | None:
    try:
        found: Json = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return found


def _write(path: Path, value: Json) -> None:
    """Replace a file as a whole, whenever the process may end."""
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    new.write_bytes(dump(value))
    new.replace(path)
