"""Tokenizers of transformers: what begins a text, and the text of tokens that follow others, beside transformers itself."""

import json

import numpy as np
import pytest
import torch
from running import lockstep
from tokenizer_files import KINDS, LINES, SPECIAL, saved
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import lockstep as package
from lockstep.base.errors import DataError
from lockstep.core.numerics.word_tokens import ids_of
from lockstep.data.chat import ChatTokenizer
from lockstep.data.packing import BEGIN, END
from lockstep.data.text_tokenizers import open_tokenizer, saved_tokenizer

ODD = ["", " ", "  two  spaces", "    .", "caf\u00e9 \U0001f600\U0001f600 \u65e5\u672c", "a\n\n b\t", " the fox"]


def ours(folder, **settings):
    return open_tokenizer(str(folder), None, vocabulary=0, cache=folder, **settings)


@pytest.mark.parametrize("add_bos", ["auto", True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("kind", ["Llama 2", "Llama 3"])
def test_a_text_begins_as_with_transformers(tmp_path, kind, adds_bos, add_bos):
    """Also with what an export keeps of it, and where BOS is EOS, as with OPT; a piece that goes on does not begin."""
    from transformers import AutoTokenizer

    for bos in ("<s>", "</s>"):
        saved(tmp_path / "made", kind, adds_bos=adds_bos, bos=bos)
        tokenizer = ours(tmp_path / "made", add_bos=add_bos)
        theirs = AutoTokenizer.from_pretrained(tmp_path / "made")
        begins = adds_bos if add_bos == "auto" else add_bos
        bare = theirs(LINES[0], add_special_tokens=False).input_ids
        expected = [theirs.bos_token_id] * begins + bare
        found = tokenizer([BEGIN + LINES[0] + END, LINES[0], LINES[0] + END, BEGIN + LINES[0], END])
        end = [theirs.eos_token_id]
        assert [each.tolist() for each in found] == [expected + end, bare, bare + end, expected, end]
        if add_bos == "auto":
            assert theirs(LINES[0]).input_ids == expected
        tokenizer.save(tmp_path / "export")
        assert AutoTokenizer.from_pretrained(tmp_path / "export")(LINES[0]).input_ids == expected
        again = saved_tokenizer(str(tmp_path / "made"), tmp_path / "export", add_bos=add_bos)
        assert again([BEGIN + LINES[0]])[0].tolist() == expected
        before = saved_tokenizer(str(tmp_path / "made"), tmp_path / "export")  # of a version without data.add_bos
        assert before([BEGIN + LINES[0]])[0].tolist() == bare


def test_a_name_in_a_text_is_no_bos(tmp_path):
    """Nor is it put before a text twice."""
    saved(tmp_path, "Llama 2")
    (ids,) = ours(tmp_path)([f"{BEGIN}<s>the fox"])
    assert ids.tolist().count(1) == 0 and ids.tolist().count(0) == 1


def test_chats_without_a_template_begin_so_too(tmp_path):
    theirs = saved(tmp_path, "Llama 2")
    chat = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    tokenizer = ChatTokenizer(ours(tmp_path))
    (ids,) = tokenizer([json.dumps(chat)])
    prompt = tokenizer.prompt(chat[:1])
    assert ids[0] == ~theirs.bos_token_id and ids_of(ids).tolist().count(theirs.bos_token_id) == 1
    assert prompt == ids_of(ids)[: len(prompt)].tolist()


def test_where_there_is_no_bos(tmp_path):
    saved(tmp_path, "Llama 3", adds_bos=False, bos=None)
    assert ours(tmp_path, add_bos=False)([BEGIN + "a"])[0].tolist() == ours(tmp_path)([BEGIN + "a"])[0].tolist()
    for name in (str(tmp_path), "bytes", "bpe"):
        with pytest.raises(DataError, match=r"data.add_bos=true, but data.tokenizer=.* has no"):
            open_tokenizer(name, None, vocabulary=300, cache=tmp_path, add_bos=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_what_follows_it_are_the_text(tmp_path, kind):
    """Wherever tokens are divided, told one by one, and as transformers decodes all of them."""
    theirs = saved(tmp_path, kind)
    tokenizer = ours(tmp_path)
    for text in [*LINES, *ODD, " ".join(ODD)]:
        ids = tokenizer([BEGIN + text])[0].tolist()
        if kind == "not legacy":  # for which " fox" at the beginning is "fox"
            text = text.removeprefix(" ")
        assert tokenizer.text_after([], ids) == theirs.decode(ids, skip_special_tokens=True) == text
        for place in range(len(ids) + 1):
            prompt, rest = ids[:place], ids[place:]
            before = tokenizer.text_after([], prompt)
            if "\ufffd" in before:  # a prompt is a text
                continue
            assert before + tokenizer.text_after(prompt, rest) == text
            told = ""
            for count in range(len(rest) + 1):
                found = tokenizer.text_after(prompt, rest[:count]).rstrip("\ufffd")
                assert found.startswith(told)
                told = found
            assert before + told == text
    assert tokenizer.text_after([], [10**6]) == ""  # embeddings may have more rows than there are tokens


@pytest.mark.parametrize("kind", ["Llama 2", "not legacy", "Gemma"])
def test_what_is_cut_or_broken_leaves_the_rest(tmp_path, kind):
    saved(tmp_path, kind)
    tokenizer = ours(tmp_path)
    (smiles,) = tokenizer([BEGIN + "\U0001f600\U0001f600"])
    assert tokenizer.text_after([], smiles[:-1].tolist()) == "\U0001f600\ufffd"
    stray = len(SPECIAL) + 0x80
    (the,) = tokenizer(["a the"])
    broken = [*smiles.tolist(), stray, *the.tolist()[-1:]]
    assert tokenizer.text_after([], broken) == f"\U0001f600\U0001f600\ufffd{tokenizer.text_after([5], broken[-1:])}"
    assert tokenizer.text_after(smiles.tolist(), [stray]) == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ["the fox", " the fox", "\n the fox"])
def test_an_answer_behind_a_special_token(tmp_path, kind, answer):
    """The space that a tokenizer of the older kind puts there is none of the answer."""
    theirs = saved(tmp_path, kind)
    tokenizer = ours(tmp_path)
    ids = theirs(f"the dog<turn>{answer}").input_ids
    place = ids.index(theirs.convert_tokens_to_ids("<turn>")) + 1
    assert tokenizer.text_after(ids[:place], ids[place:]) == answer


def test_tokens_of_words_go_on_from_the_prompt(tmp_path):
    """Tokenizers of which nothing tells what a token adds."""
    made = Tokenizer(models.WordPiece({token: id for id, token in enumerate([*SPECIAL, "[UNK]", "fox", "##es", ","])}))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = ours(tmp_path)
    fox, ending, comma = (made.token_to_id(token) for token in ("fox", "##es", ","))
    assert tokenizer.text_after([fox], [fox, ending, comma, fox]) == " foxes, fox"
    assert tokenizer.text_after([fox], [ending]) == "es" and not tokenizer.token_bytes.any()


@pytest.mark.timeout(200)
def test_an_export_goes_on_as_transformers_does(tmp_path):
    """Whole texts, through the command: from documents to what is generated."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    theirs = saved(tmp_path / "base", "Llama 2")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(theirs), **sizes)).save_pretrained(tmp_path / "base")
    (tmp_path / "t").mkdir()
    for number in range(30):
        (tmp_path / "t" / f"{number:02}.txt").write_text(LINES[number % 3])
    (tmp_path / "c.yaml").write_text(
        "data: {kind: text, train: t, context: 16, cache: cache}\n"
        "model: {kind: causal_lm, name: base}\ntrain: {steps: 40, global_batch: 8, micro_batch: 8}\noptim: {lr: 0.01}\n"
        "evaluate: {sample_tokens: 0}\n"
    )
    done = lockstep(tmp_path, "train", "c.yaml", "run.name=r", "launch.processes=1")
    assert done.returncode == 0, done.stdout + done.stderr
    (ids,) = [np.load(file) for file in (tmp_path / "cache").rglob("ids.npy") if len(np.load(file)) > 200]
    assert ids.tolist()[: ids.tolist().index(1) + 1] == [*theirs(LINES[0]).input_ids, theirs.eos_token_id]
    done = lockstep(tmp_path, "export", "runs/r", "--to", "e")
    assert done.returncode == 0, done.stdout + done.stderr
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tmp_path / "e"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "e"),
    )
    loaded = package.load(tmp_path / "e")
    for prompt in ("the quick brown fox", "the", "a fox", "the dog runs", " jumps"):
        given = tokenizer(prompt, return_tensors="pt")
        made = model.eval().generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=1, eos_token_id=1)[0]
        whole = tokenizer.decode(made, skip_special_tokens=True)
        assert prompt + loaded.generate(prompt, max_tokens=12, temperature=0).text == whole
        assert prompt + "".join(loaded.stream(prompt, max_tokens=12, temperature=0)) == whole
