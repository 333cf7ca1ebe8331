"""Models of sounds from transformers: one bit pattern on every cluster, exports that transformers reads, and servers."""

import base64
import io
import json
import re
import sys

import numpy as np
import pyarrow.csv
import pytest
import soundfile
import torch
from running import lockstep, summary
from served import serving

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import DataError, MissingExtra, ModelError
from lockstep.core.host.pretrained_processors import FeatureExtractor, Waves
from lockstep.data.sounds import SoundReader, tone
from lockstep.data.sources import _audio as source
from lockstep.data.sources import audio
from lockstep.inference.predict.input_rows import open_input
from lockstep.inference.trained_model import open_predictor
from lockstep.models import _audio_classifier as classifier
from lockstep.models import audio_classifier
from lockstep.models import transformer as text_models
from lockstep.recipe import recipe as recipes

RATES, ENDINGS = (8_000, 11_025, 16_000, 22_050), ("wav", "flac", "ogg", "mp3")
SHORT = ["train.epochs=1", "train.global_batch=8", "train.micro_batch=2", "optim.lr=1e-3", "checkpoint.keep=1"]
SPEC = DataSpec(modality="audio", labels=("high", "low"))
WORLDS = {
    "group": [("1", "ddp"), ("2", "ddp"), ("3", "ddp")],
    "layer": [("1", "ddp"), ("2", "fsdp"), ("2", "pipeline")],
    "ast": [("1", "ddp"), ("2", "fsdp")],
}
"""Model -> clusters that give the same bits."""


def wave(pitch, seconds, rate, seed=0):
    times = np.arange(int(seconds * rate)) / rate
    return 0.4 * np.sin(2 * np.pi * pitch * times) + 0.02 * np.random.default_rng(seed).standard_normal(len(times))


def saved_wav2vec2(folder, norm):
    """With SpecAugment, as by default, and random skips of layers, which are not done."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

    torch.manual_seed(0)
    convolutions = {"conv_dim": (16, 16, 16), "conv_kernel": (10, 8, 4), "conv_stride": (10, 8, 4)}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    config = Wav2Vec2Config(
        **{"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, **positions},
        **{"intermediate_size": 32, "classifier_proj_size": 16, "feat_extract_norm": norm, **convolutions},
        **{"do_stable_layer_norm": norm == "layer", "mask_time_prob": 0.2, "mask_time_length": 3, "layerdrop": 0.5},
    )
    Wav2Vec2Model(config).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(return_attention_mask=norm == "layer").save_pretrained(folder)


def saved_ast(folder):
    from transformers import ASTConfig, ASTFeatureExtractor, ASTModel

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ASTModel(ASTConfig(**shape, max_length=64, num_mel_bins=32)).save_pretrained(folder)
    ASTFeatureExtractor(max_length=64, num_mel_bins=32).save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Sounds of two pitches, of different rates, lengths, channels and formats; models of random weights."""
    folder = tmp_path_factory.mktemp("audio")
    for name, pitch in (("high", 1800), ("low", 300)):
        (folder / "sounds" / name).mkdir(parents=True)
        for number in range(12):
            rate = RATES[number % 4]
            sound = wave(pitch, 0.3 + 0.05 * (number % 5), rate, seed=number)
            if number % 3 == 0:
                sound = np.stack([sound, 0.5 * sound], axis=1)
            soundfile.write(folder / "sounds" / name / f"{number}.{ENDINGS[number // 3]}", sound, rate)
    saved_wav2vec2(folder / "group", "group")
    saved_wav2vec2(folder / "layer", "layer")
    saved_ast(folder / "ast")
    return folder


def trained(place, model, world, kind="ddp", *more):
    """The name of a finished run."""
    name = "-".join([model, world, kind, *filter(str.isdigit, "".join(more))])
    if (place / "runs" / name).exists():
        return name
    settings = ["data.kind=audio", "data.train=sounds", "model.kind=audio_classifier", f"model.name={model}", *SHORT]
    cluster = [f"run.name={name}", f"launch.processes={world}", f"parallel.kind={kind}", *more]
    (place / "empty.yaml").write_text("{}")
    done = lockstep(place, "train", "empty.yaml", *settings, *cluster)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "other outputs" not in done.stdout + done.stderr
    assert ("skips layers at random" in done.stdout) == (model != "ast")
    return name


@pytest.mark.parametrize("block", [1, 4])
def test_the_weights_do_not_depend_on_where_a_pipeline_is_cut(place, block):
    """Before a convolution, whose gradient has another memory order; before a block whose input a later one takes, too."""
    cut = summary(place, trained(place, "layer", "2", "pipeline", f"parallel.cut=[{block}]"))
    assert cut["digest"] == summary(place, trained(place, "layer", "1"))["digest"]


@pytest.fixture(scope="module")
def export(place):
    """Of Wav2Vec2 with masks, and what was said of it."""
    name = trained(place, "layer", "1")
    done = lockstep(place, "export", f"runs/{name}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same weights bit for bit" in done.stdout
    return place / "runs" / name / "export"


@pytest.mark.parametrize(
    "model", ["ast", *(pytest.param(model, marks=pytest.mark.matrix) for model in WORLDS if model != "ast")]
)
def test_the_weights_are_equal_on_every_cluster(place, model):
    found = [summary(place, trained(place, model, *world)) for world in WORLDS[model]]
    assert len({each["digest"] for each in found}) == 1
    assert len({json.dumps(each["evaluation"]) for each in found}) == 1


def test_transformers_gives_the_same_answers(place, export):
    from transformers import pipeline

    predictor = open_predictor(export)
    assert predictor.facts.modality == "audio"
    sounds = [wave(pitch, seconds, 16_000) for pitch, seconds in ((300, 0.5), (1800, 0.7), (900, 0.3))]
    files = []
    for sound in sounds:
        file = io.BytesIO()
        soundfile.write(file, sound, 16_000, format="WAV", subtype="FLOAT")
        files.append(file.getvalue())
    ours = predictor.scores(predictor.encode(files))
    theirs = pipeline("audio-classification", str(export))
    for row, sound in zip(ours, sounds, strict=True):
        expected = {each["label"]: each["score"] for each in theirs(sound.astype(np.float32))}
        assert dict(zip(predictor.facts.labels, row.tolist(), strict=True)) == pytest.approx(expected, abs=1e-5)


def test_a_folder_is_evaluated_and_predicted(place, export):
    done = lockstep(place, "evaluate", str(export), "--file", "sounds", "--to", "evaluated")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((place / "evaluated" / "evaluation.json").read_text())
    done = lockstep(place, "predict", str(export), "sounds", "--out", "out.csv", "--processes", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = pyarrow.csv.read_csv(place / "out.csv").to_pylist()
    assert [row["file"] for row in rows][:2] == ["high/0.wav", "high/1.wav"]
    accuracy = np.mean([row["file"].startswith(row["label"]) for row in rows])
    assert found["metrics"]["accuracy"] == pytest.approx(accuracy)
    with pytest.raises(DataError, match=r"has no sounds in it \(.wav, .flac, .ogg, .+\), nor have its folders$"):
        next(open_input(export, "text", "audio").chunks())


def test_a_server_answers_with_what_it_hears(place, export):
    file = (place / "sounds" / "low" / "11.mp3").read_bytes()
    predictor = open_predictor(export)
    (scores,) = predictor.scores(predictor.encode([file]))
    expected = dict(zip(predictor.facts.labels, scores.tolist(), strict=True))
    with serving(export) as server:
        asked = {"audio": base64.b64encode(file).decode()}
        answers = [
            server.post(json=asked),
            server.post(files={"file": ("a.mp3", file)}),
            server.post(content=file, headers={"content-type": "audio/mpeg"}),
        ]
        for answer in answers:
            assert answer.status_code == 200, answer.text
            assert answer.json()["probabilities"] == pytest.approx(expected, abs=1e-5)
        both = server.post("/predict/batch", json={"audios": [asked["audio"]] * 2})
        assert [each["label"] for each in both.json()["predictions"]] == [answers[0].json()["label"]] * 2
        wrong = server.post(json={"audio": base64.b64encode(b"no sound at all").decode()})
        assert wrong.status_code == 422 and "cannot be read as a sound" in wrong.json()["error"]
        assert "WAV, FLAC, OGG or MP3" in server.post(json={"audio": "?"}).json()["error"]
        content = server.get("/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]["content"]
        assert {"application/json", "multipart/form-data", "audio/wav"} <= set(content)
        example = content["application/json"]["example"]
        assert server.post(json=example).status_code == 200
        assert 'id="sound"' in server.get("/").text


def test_sounds_of_any_rate_and_length_are_read(place, tmp_path):
    reader = SoundReader(Waves(), 0.5)
    for rate in (*RATES, 44_100):
        soundfile.write(tmp_path / "a.wav", wave(440, 0.4, rate), rate)
        heard = reader(tmp_path / "a.wav", "it")
        assert heard.dtype == np.float32 and abs(len(heard) - 6400) <= 1
        assert list(reader.lengths([tmp_path / "a.wav"], skips=False)) == [len(heard)]
        spectrum = np.abs(np.fft.rfft(heard))
        assert spectrum.argmax() * 16_000 / len(heard) == pytest.approx(440, abs=3)
    soundfile.write(tmp_path / "long.wav", wave(440, 2, 8_000), 8_000)
    soundfile.write(tmp_path / "short.wav", wave(440, 0.01, 8_000), 8_000)
    assert len(reader(tmp_path / "long.wav", "it")) == 8_000
    assert len(reader(tmp_path / "short.wav", "it")) == 4_000  # silence follows
    extractor = FeatureExtractor(str(place / "ast"))
    assert SoundReader(extractor, 9)(tone(440), "it").shape == (64, 32)
    assert SoundReader(extractor, 9).lengths([tmp_path / "long.wav"], skips=False) is None


def test_files_that_cannot_be_read_stop_a_run_or_are_left_out(place, tmp_path):
    for name in ("high", "low"):
        (tmp_path / "sounds" / name).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "sounds" / name / f"{number}.wav").write_bytes(tone(440))
    broken = tmp_path / "sounds" / "low" / "3.wav"
    broken.write_bytes(b"RIFF....")
    config = audio.Config(kind="audio", train=tmp_path / "sounds", test=tmp_path / "sounds", feature_extractor="none")
    with pytest.raises(DataError, match=f"{re.escape(str(broken))} cannot be read as a sound"):
        source.build(config, "train")
    split = source.build(config.model_copy(update={"on_bad_sample": "skip"}), "train")
    assert list(split.lengths) == [4000] * 7 + [0]
    with pytest.raises(DataError, match="cannot be read as a sound"):
        split.__getitems__([6, 7])
    settings = ["data.kind=audio", "data.train=sounds", "data.test=sounds", "data.on_bad_sample=skip"]
    settings += ["model.kind=audio_classifier", f"model.name={place / 'group'}", *SHORT]
    (tmp_path / "a.yaml").write_text("{}")
    digests = set()
    for world in ("1", "2"):
        done = lockstep(tmp_path, "train", "a.yaml", *settings, f"launch.processes={world}", f"run.name=w{world}")
        assert done.returncode == 0, done.stdout + done.stderr
        found = summary(tmp_path, f"w{world}")
        digests.add(found["digest"])
        assert found["bad_samples"]["train"] == {"count": 1, "indices": [7]}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: soundfile.write(file, np.zeros(0), 8_000), "is empty"),
        (lambda file: soundfile.write(file, np.full(900, np.nan), 8_000, subtype="FLOAT"), "not finite"),
        (lambda file: soundfile.write(file, np.zeros(900), 8_000, format="AIFF"), "is AIFF: what is read is WAV"),
        (lambda file: soundfile.write(file, np.zeros(900), 100), "a sampling rate of 100 Hz"),
        (lambda file: file.mkdir(), "is no file"),
    ],
)
def test_what_is_no_usable_sound_is_named(tmp_path, write, message):
    write(tmp_path / "a.wav")
    with pytest.raises(DataError, match=message):
        SoundReader(Waves(), 1)(tmp_path / "a.wav", "a.wav")


def test_messages(place, minilm, tmp_path, monkeypatch):
    def built(name):
        return classifier.build(audio_classifier.Config(kind="audio_classifier", name=str(name)), SPEC)

    with pytest.raises(ModelError, match="bert model, with which transformers does not classify sounds"):
        built(minilm)
    with pytest.raises(ModelError, match="takes sounds, with targets for each"):
        classifier.build(
            audio_classifier.Config(kind="audio_classifier", name=str(place / "group")), DataSpec(modality="image")
        )
    saved_ast(tmp_path / "other")
    (tmp_path / "other" / "preprocessor_config.json").write_bytes(
        (place / "group" / "preprocessor_config.json").read_bytes()
    )
    with pytest.raises(ModelError, match="does not take what its feature extractor gives"):
        built(tmp_path / "other")
    (tmp_path / "other" / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match="cannot load the feature extractor of"):
        built(tmp_path / "other")
    (tmp_path / "none" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match=r"has no sounds in folders.*\.wav, \.flac"):
        source.build(audio.Config(kind="audio", train=tmp_path / "none"), "train")
    data = {"kind": "audio", "train": str(place / "sounds")}
    for model, wrong, message in (
        ({"kind": "transformer"}, {}, "transformer takes texts, but data.kind=audio gives sounds"),
        ({"kind": "audio_classifier"}, {"feature_extractor": "none"}, "takes what its own gives"),
    ):
        with pytest.raises(recipes.ConfigError, match=message):
            recipes.of_sections({"data": {**data, **wrong}, "model": model})
    assert text_models.Config(kind="transformer").own("feature_extractor") is None
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lockstep-train\[audio\]'"):
        SoundReader(Waves(), 1)


@pytest.mark.parametrize("task", ["audio", "audio_classifier"])
def test_a_config_to_start_from(tmp_path, task):
    assert lockstep(tmp_path, "init", task).returncode == 0
    found = recipes.load(tmp_path / f"{task}.yaml")
    assert (found.data.kind, found.model.kind) == ("audio", "audio_classifier")
    assert found.data.feature_extractor == found.model.name
    assert "feature_extractor: facebook" not in (tmp_path / f"{task}.yaml").read_text()
