"""Uploads an export, or the folder of a Space, to the Hugging Face hub in one commit, or to an object store.

An object store cannot replace several files at once. So lockstep.json, without which there is no export, is deleted
first and written last, and meanwhile a file lists what is being uploaded: after a kill, the next upload continues.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.base.errors import HubError, ModelError
from lockstep.base.remote_path import RemotePath
from lockstep.core.host import remote_storage
from lockstep.core.host.hub_access import hub_answers
from lockstep.inference.export import export_facts, space
from lockstep.inference.export.export_facts import ExportFacts

if TYPE_CHECKING:
    from huggingface_hub import HfApi

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
Upload = Callable[[Path, ExportFacts], str]
"""(folder, facts) -> address of the repository or store. Raises HubError, ModelError, or an error of the store."""
UNFINISHED = "lockstep-upload.json"
"""File of an object store with the names of all files of the previous upload, and of the unfinished one."""
REFUSALS = {
    401: "does not accept the token: log in again with `hf auth login`, or set HF_TOKEN to one that is valid",
    403: "does not allow this: the token needs permission to write, and OWNER should be you or your organization",
}
"""Text of a refusal, by HTTP status."""


def to_hub(name: str, *, is_space: bool, is_private: bool) -> Upload:
    """Check what can be known before an export -> a function that uploads it as OWNER/NAME. Raises HubError."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    is_valid = False
    with suppress(HFValidationError):
        validate_repo_id(name)
        is_valid = NAME.fullmatch(name) is not None
    if not is_valid:
        raise HubError(
            f"{name!r} is no name on the hub: give --push OWNER/NAME, of letters, digits, '-', '_' and '.', such as "
            "ada/digits"
        )
    if constants.HF_HUB_OFFLINE:
        raise HubError("nothing can be pushed in offline mode: unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE")
    if get_token() is None:
        raise HubError("a push needs a token that may write: log in with `hf auth login`, or set HF_TOKEN")
    if not hub_answers():
        raise HubError(f"{constants.ENDPOINT} does not answer: check the network, and HF_ENDPOINT if it is set")

    return partial(_upload, name=name, kind="space" if is_space else "model", is_private=is_private)


def _upload(folder: Path, facts: ExportFacts, *, name: str, kind: str, is_private: bool) -> str:
    """Create the repository if there is none, and commit the folder's files -> its address. The commit also removes
    files of an earlier export that this one no longer has: transformers would read them."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects

    api = HfApi(library_name="lockstep")
    sdk = "docker" if kind == "space" else None
    with _hub_errors(name, folder):
        url = api.create_repo(name, repo_type=kind, private=is_private or None, space_sdk=sdk, exist_ok=True)
        if is_private and not api.repo_info(name, repo_type=kind).private:
            raise HubError(f"{url} is there already, and public: make it private in its settings, or give another name")
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        names = [*filter_repo_objects(files, ignore_patterns=DEFAULT_IGNORE_PATTERNS)]
        gone = sorted(_previous_files(api, name, kind).difference(names))
        added = (CommitOperationAdd(each, folder / each) for each in names)
        removed = (CommitOperationDelete(each, is_folder=False) for each in gone)
        message = f"{facts.name}, step {facts.step}, digest {facts.digest}"
        api.create_commit(name, [*added, *removed], repo_type=kind, commit_message=message)
        return str(url)


def _previous_files(api: "HfApi", name: str, kind: str) -> set[str]:
    """List the files of the export that the repository holds; empty where it holds none."""
    from huggingface_hub.errors import EntryNotFoundError

    prefix = f"{space.MODEL}/" if kind == "space" else ""
    held = set(api.list_repo_files(name, repo_type=kind))
    with suppress(EntryNotFoundError, ValueError, KeyError, TypeError):
        file = api.hf_hub_download(name, f"{prefix}{export_facts.FILE}", repo_type=kind)
        return held & _listed(Path(file).read_bytes(), prefix)
    return set()


def _listed(facts: bytes, prefix: str) -> set[str]:
    """List the files that the facts of an export name."""
    return {f"{prefix}{name}" for name in json.loads(facts)["files"]}


@contextmanager
def _hub_errors(name: str, folder: Path) -> Iterator[None]:
    """Turn the client's exceptions into HubError."""
    from huggingface_hub.errors import HfHubHTTPError

    kept = f"\n  The export is in {folder}; the same command pushes it again, without what has arrived already."
    try:
        yield
    except HubError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = error.server_message or str(error).partition("\n")[0]
        what = REFUSALS.get(status, f"answers {status}")
        raise HubError(f"{name}: the hub {what} ({reason}){kept}") from error
    except Exception as error:  # of the client and its dependencies
        reason = str(error.__cause__ or error).partition("\n")[0] or type(error).__name__
        raise HubError(f"{name}: the upload has failed ({reason}){kept}") from error


def to_store(place: RemotePath, *, is_space: bool) -> Upload:
    """Check the place before an export -> a function that uploads a folder and returns its URL. Raises UserError."""
    prefix = f"{space.MODEL}/" if is_space else ""
    facts = f"{prefix}{export_facts.FILE}"
    old = _stored_files(place, facts, prefix)

    def upload(folder: Path, _: ExportFacts) -> str:
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        remote_storage.write(place / UNFINISHED, json.dumps(sorted(old | names)).encode())
        remote_storage.remove(place, [facts])
        remote_storage.upload(folder, place, sorted(names - {facts}))
        remote_storage.upload(folder, place, [facts])
        remote_storage.remove(place, [*sorted(old - names), UNFINISHED])
        return str(place)

    return upload


def _stored_files(place: RemotePath, facts: str, prefix: str) -> set[str]:
    """List the files of an earlier export at a place, which the next one replaces. Raises ModelError for any others."""
    held = remote_storage.listed(place).keys()
    known = set[str]()
    try:
        if UNFINISHED in held:
            known |= set(json.loads(remote_storage.read(place / UNFINISHED)))
        if facts in held:
            known |= {facts, *_listed(remote_storage.read(place / facts), prefix)}
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"{place} holds an export that cannot be read: name another place with --to") from None
    if held and not known:
        raise ModelError(f"{place} holds other files, such as {min(held)!r}: name an empty place with --to")
    return known & held
