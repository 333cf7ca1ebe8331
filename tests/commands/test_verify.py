"""`lockstep verify` on real runs: what is as it was trained passes, and what was exchanged since is found."""

import json
import shutil
import sys
from dataclasses import asdict, replace

import pytest
from running import lockstep
from slowing import SLOWS

from lockstep.checkpoint import layout

CONFIG = """
data: {kind: text, train: words.txt, context: 16}
model: {kind: gpt, layers: 1, width: 16, heads: 2}
train: {steps: 12, global_batch: 8, micro_batch: 4}
evaluate: {every_epochs: null, limit: 8, sample_tokens: 0}
checkpoint: {every_steps: 4}
"""
STEPS = (4, 8, 12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs that differ in their seed, the first killed and resumed in between; to be copied, not touched."""
    folder = tmp_path_factory.mktemp("verified")
    (folder / "words.txt").write_text("".join(f"the {n} of {n * n % 97}\n" for n in range(300)))
    (folder / "c.yaml").write_text(CONFIG)
    for settings in (["run.name=a"], ["run.name=b", "run.seed=1"]):
        done = lockstep(folder, "train", "c.yaml", "launch.processes=2", *settings)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """The first run, beside the second, in a folder of its own."""
    folder = shutil.copytree(trained, tmp_path / "copy")
    for name in ("a", "b"):
        recipe = folder / "runs" / name / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace(str(trained), str(folder)))
    return folder / "runs" / "a"


def verify(run, *arguments):
    """Run the command where the run's config lies -> exit code, output."""
    done = lockstep(run.parents[1], "verify", f"runs/{run.name}", *arguments)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def checkpoint(run, step):
    return layout.folder_of(run / "checkpoints", step)


def links(run):
    return [layout.Link(**each) for each in json.loads((run / "summary.json").read_text())["checkpoints"]]


def rewrite(run, change=lambda manifest: manifest):
    """Change every manifest, and make the hash chain anew as somebody would who knows how."""
    chain = ()
    for step in STEPS:
        manifest = change(layout.read_manifest(checkpoint(run, step))).after(chain)
        chain = manifest.checkpoints
        (checkpoint(run, step) / layout.MANIFEST).write_text(manifest.text())
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    summary |= {"checkpoints": [asdict(link) for link in chain], "digest": chain[-1].digest}
    file.write_text(json.dumps(summary))


@pytest.mark.core
def test_a_run_is_what_its_config_and_its_data_give(run):
    code, text = verify(run, "--from-start")
    assert code == 0, text
    assert "3 checkpoints read to the last byte, 3 in the hash chain" in text
    assert "12 of 12 steps are run again, about " in text
    for first, last in ((1, 4), (5, 8), (9, 12)):
        digest = layout.read_manifest(checkpoint(run, last)).digest
        assert f"steps {first} to {last}: the same weights, {digest[:16]}" in text
    assert text.endswith("verified\n")
    assert {each.name for each in run.iterdir()} == {each.name for each in (run.parent / "b").iterdir()}


def test_the_chain_lists_every_checkpoint_also_those_that_are_gone(run):
    chain = links(run)
    assert [link.step for link in chain] == [*STEPS] and layout.broken_link(chain) is None
    for step in STEPS:
        manifest = layout.read_manifest(checkpoint(run, step))
        assert list(manifest.checkpoints) == [link for link in chain if link.step <= step]
    shutil.rmtree(checkpoint(run, 4))
    code, text = verify(run)
    assert code == 0 and "2 checkpoints read to the last byte, 3 in the hash chain" in text
    assert "4 of 12 steps are run again" in text  # those before step 8 only where --from-start asks for it


def test_an_exchanged_checkpoint_is_found(run):
    shutil.rmtree(checkpoint(run, 8))
    shutil.copytree(checkpoint(run.parent / "b", 8), checkpoint(run, 8))
    code, text = verify(run)
    assert code == 1 and text.endswith("NOT VERIFIED\n")
    assert "WRONG: step-000000008 is not the checkpoint that was in its place: the hash chain names another" in text


def test_a_changed_manifest_is_found_also_with_a_right_checksum(run):
    file = checkpoint(run, 8) / layout.MANIFEST
    original = layout.read_manifest(file.parent)
    better = replace(original, metrics={"loss": 0.001})
    file.write_text(better.text())
    assert "step-000000008: its manifest has been changed since it was written" in verify(run, "--segments", "0")[1]
    file.write_text(better.after(original.checkpoints[:-1]).text())
    code, text = verify(run, "--segments", "0")
    assert code == 1 and "step-000000008 is not the checkpoint that was in its place" in text


def test_a_changed_file_of_a_checkpoint_is_found(run):
    (name, *_) = sorted(checkpoint(run, 12).glob("*.distcp"))
    content = bytearray(name.read_bytes())
    content[len(content) // 2] ^= 1
    name.write_bytes(content)
    code, text = verify(run)
    assert code == 1 and f"step-000000012: {name.name} has been changed (its sha256 differs)" in text


def test_a_link_that_was_changed_is_found(run):
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    summary["checkpoints"][1]["digest"] = "0" * 64
    file.write_text(json.dumps(summary))
    code, text = verify(run)
    assert code == 1 and "the hash chain is broken at step 8" in text


def test_changed_data_is_found(run):
    words = run.parents[1] / "words.txt"
    words.write_text(words.read_text().replace("the 7 of 49", "the 7 of 48"))
    code, text = verify(run, "--segments", "1")
    assert code == 1 and "data.contents: the training samples, their labels or their order have changed" in text


def test_another_config_is_found(run):
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 0", "seed: 3"))
    code, text = verify(run, "--segments", "1")
    assert code == 1 and "run.seed: 0 in the checkpoint, 3 now" in text


def test_weights_that_the_config_does_not_give_are_found_though_everything_else_fits(run):
    """Weights of another seed, with the config of this one, and a chain that was made for them."""
    own = {step: layout.read_manifest(checkpoint(run, step)).numeric for step in STEPS}
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(run.parent / "b" / "checkpoints", run / "checkpoints")
    rewrite(run, lambda manifest: replace(manifest, numeric=own[manifest.step]))
    code, text = verify(run, "--segments", "1")
    assert code == 1 and "WRONG" not in text and ", not " in text and text.endswith("NOT VERIFIED\n")


def test_on_another_processor_only_the_files_are_verified(run):
    rewrite(run, lambda manifest: replace(manifest, numeric={**manifest.numeric, "device_model": "Z80"}))
    code, text = verify(run)
    assert code == 2 and "bits cannot be compared here (device_model: 'Z80' in the checkpoint, " in text
    assert text.endswith("verified only the files\n")


def test_a_run_that_was_killed_is_verified_by_its_newest_checkpoint(run):
    (run / "summary.json").unlink()
    assert verify(run, "--segments", "1")[0] == 0
    done = lockstep(run.parents[1], "train", "runs/a/recipe.yaml")
    assert done.returncode == 0 and verify(run, "--segments", "0")[0] == 0


def test_honest_runs_are_not_accused(run):
    """One that failed after its last checkpoint, one that an earlier version began, and one that it has ended."""
    quick, file = ("--segments", "0"), run / "summary.json"
    summary = json.loads(file.read_text())
    file.write_text(json.dumps({**summary, "status": "failed", "steps": 13, "digest": "0" * 64}))
    assert verify(run, *quick)[0] == 0
    first = checkpoint(run, 4) / layout.MANIFEST
    first.write_text(replace(layout.read_manifest(first.parent), checkpoints=()).text())
    chain = ()
    for step in STEPS[1:]:
        manifest = layout.read_manifest(checkpoint(run, step)).after(chain)
        chain = manifest.checkpoints
        (checkpoint(run, step) / layout.MANIFEST).write_text(manifest.text())
    file.write_text(json.dumps({**summary, "checkpoints": [asdict(link) for link in chain]}))
    code, text = verify(run, *quick)
    assert code == 0 and "not in the hash chain, which began later: the checkpoints of steps 4" in text
    del summary["checkpoints"]
    file.write_text(json.dumps(summary))
    assert "there is no hash chain in summary.json: the run was made by an earlier version" in verify(run, *quick)[1]


def test_a_resume_continues_the_chain(run):
    before = links(run)
    for step in (12, 8):
        shutil.rmtree(checkpoint(run, step))
    done = lockstep(run.parents[1], "train", "runs/a/recipe.yaml", "launch.processes=1")
    assert done.returncode == 0, done.stderr
    chain = links(run)
    assert chain[0] == before[0] and [link.digest for link in chain] == [link.digest for link in before]
    assert chain[1] != before[1] and verify(run)[0] == 0  # saved at another time


def test_signatures(run, tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    for name in ("mine", "other"):
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (tmp_path / f"{name}.pem").write_bytes(pem)
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)
    quick = ("--segments", "0")
    assert "there is no signature.json in" in verify(run, *quick, "--check", str(tmp_path / "mine.pub"))[1]
    assert verify(run, *quick, "--sign", str(tmp_path / "mine.pub"))[0] == 2  # no private key
    code, text = verify(run, *quick, "--sign", str(tmp_path / "mine.pem"))
    assert code == 0 and f"signed: {run / 'signature.json'}" in text
    assert verify(run, *quick, "--check", str(tmp_path / "mine.pub"))[0] == 0
    original = (run / "summary.json").read_text()
    shutil.move(checkpoint(run, 12), tmp_path / "later")
    earlier = json.loads(original)
    earlier["checkpoints"] = earlier["checkpoints"][:2]
    (run / "summary.json").write_text(json.dumps(earlier))
    assert verify(run, *quick, "--sign", str(tmp_path / "mine.pem"))[0] == 0
    (run / "summary.json").write_text(original)
    shutil.move(tmp_path / "later", checkpoint(run, 12))
    code, text = verify(run, *quick, "--check", str(tmp_path / "mine.pub"))
    assert code == 1 and "the checkpoints after step 8 are not signed" in text
    verify(run, *quick, "--sign", str(tmp_path / "mine.pem"))
    code, text = verify(run, *quick, "--check", str(tmp_path / "other.pub"))
    assert code == 1 and "signature.json was not made with the key of" in text
    rewrite(run, lambda manifest: replace(manifest, metrics={"loss": 0.001}))
    assert verify(run, *quick)[0] == 0  # whoever writes all files makes a chain that holds ...
    code, text = verify(run, *quick, "--check", str(tmp_path / "mine.pub"))
    assert code == 1 and "signature.json is of another hash chain than the run's" in text  # ... but cannot sign it
    (run / "signature.json").write_text('{"signed": 1}')
    assert verify(run, *quick, "--check", str(tmp_path / "mine.pub"))[0] == 1


def test_a_key_that_cannot_sign_is_told_before_anything_is_run_again(tmp_path):
    from lockstep.base.errors import ConfigError
    from lockstep.tools.verify.verification import VerifyOptions, verify_run

    missing = {"segments": 3, "seed": 0, "from_start": False, "sign": tmp_path / "none.pem", "check": None}
    with pytest.raises(ConfigError, match="none.pem is no private Ed25519 key"):
        verify_run(tmp_path, VerifyOptions(**missing, trusts=False), console=None)


def test_without_the_package_that_signs(run, monkeypatch):
    from lockstep.base.errors import MissingExtra
    from lockstep.tools.verify import signing

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lockstep-train\[sign\]'"):
        signing.sign(run, run / "key.pem", links(run))


def test_an_export_is_that_of_its_run(run):
    done = lockstep(run.parents[1], "export", "runs/a")
    assert done.returncode == 0, done.stderr
    export = run / "export"
    arguments = (run.parents[1], "verify", "runs/a/export", "--segments", "0")
    done = lockstep(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    done = lockstep(run.parents[1], "export", "runs/a", "export.dtype=bf16", "--to", "runs/a/export16")
    assert done.returncode == 0, done.stderr
    done = lockstep(run.parents[1], "verify", "runs/a/export16", "--segments", "0")
    assert done.returncode == 2 and "weights are not compared, as they are a graph, or in bf16" in done.stdout
    file = export / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = lockstep(*arguments)
    assert done.returncode == 1 and "the export's weights are not those of its digest" in done.stdout
    facts = json.loads((export / "lockstep.json").read_text())
    (export / "lockstep.json").write_text(json.dumps({**facts, "digest": "0" * 64}))
    assert "the run has no checkpoint of step 12 with the export's digest" in lockstep(*arguments).stdout
    shutil.move(export, run.parents[1] / "moved")
    done = lockstep(run.parents[1], "verify", "moved", "--segments", "0")
    assert done.returncode == 2 and "is no run" in done.stderr


def test_what_observers_asked_for_is_done_again_and_changed_settings_are_told_apart(run):
    folder = run.parents[1]
    (folder / "steers.py").write_text(SLOWS)
    settings = ["run.name=c", "observe.file=steers.py", "train.ema=0.9", "parallel.kind=fsdp", "launch.processes=2"]
    assert lockstep(folder, "train", "c.yaml", *settings).returncode == 0
    asked = (folder / "asked").stat().st_size
    code, text = verify(run.parent / "c", "--from-start")
    assert code == 0 and "12 of 12 steps are run again" in text
    assert (folder / "asked").stat().st_size == asked
    drifted = ["train.steps=16", "optim.lr=0.01", "--allow-drift"]
    assert lockstep(folder, "train", "runs/c/recipe.yaml", *drifted).returncode == 0
    code, text = verify(run.parent / "c", "--from-start")
    assert code == 0 and "4 of 16 steps are run again" in text and "steps 13 to 16: the same weights" in text
