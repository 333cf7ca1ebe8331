"""Tokenizers of several kinds, trained on a few lines and saved."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = ["the quick brown fox jumps over the lazy dog", "the dog runs away", "a fox, quick as the wind: it jumps"]
SPACE = "\u2581"
SPECIAL = ["<s>", "</s>", "<unk>", "<turn>"]


def sentencepiece(*, has_prefix=True, legacy=True):
    """As Llama's and, without a prefix, Gemma's: byte-pair encoding with bytes for what is unknown."""
    parts = [normalizers.Prepend(SPACE)] if has_prefix and legacy else []
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    learner.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    learner.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    named = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocabulary = {token: id for id, token in enumerate(dict.fromkeys(named))}
    merges = [tuple(each) for each in learned["merges"]]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    ends = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    if legacy:
        made.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", SPACE)])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return made


def byte_level():
    """As GPT-2's and Llama 3's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(LINES, trainer)
    return made


KINDS = {
    "Llama 2": sentencepiece,
    "not legacy": lambda: sentencepiece(legacy=False),
    "Gemma": lambda: sentencepiece(has_prefix=False),
    "Llama 3": byte_level,
}


def saved(folder, kind, *, adds_bos=True, bos="<s>"):
    """A folder with a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    made = KINDS[kind]()
    made.add_special_tokens(SPECIAL)
    if adds_bos:
        of = [(bos, made.token_to_id(bos))]
        made.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=of)
    named = {"bos_token": bos} if bos else {}
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>", **named)
    theirs.save_pretrained(folder)
    return theirs
