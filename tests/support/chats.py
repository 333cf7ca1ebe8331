"""Chats, and a tokenizer with a template of them."""

from lockstep.core.numerics.word_tokens import ids_of
from lockstep.data.chat import ChatTokenizer, Contents
from lockstep.data.sources import _chat, chat
from lockstep.data.text_tokenizers import open_tokenizer, saved_tokenizer

ASK, THANK = {"role": "user", "content": "one or two?"}, {"role": "user", "content": "thanks \u00e9"}
ANSWER, WELCOME = {"role": "assistant", "content": "two"}, {"role": "assistant", "content": "you are welcome"}
CHATS = [[ASK, ANSWER], [THANK, WELCOME], [ASK, ANSWER, THANK, WELCOME]]
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|stop|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def templated(folder, template=TEMPLATE):
    """A tokenizer of transformers with a chat template and special tokens, learned from the chats."""
    from transformers import PreTrainedTokenizerFast

    chats = _chat.build(chat.Config(kind="chat", train=folder / "chats.jsonl"), "train")
    learned = open_tokenizer("bpe", Contents(chats), vocabulary=300, cache=folder / "cache")
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=learned.tokenizer, eos_token="<|stop|>", additional_special_tokens=["<|start|>"]
    )
    theirs.chat_template = template
    theirs.save_pretrained(folder / "tokenizer")
    return ChatTokenizer(saved_tokenizer(str(folder / "tokenizer"), folder / "tokenizer"))


def said(tokenizer, ids):
    """The text of the learned and of all tokens."""
    every = ids_of(ids)
    return tokenizer.decode(ids[ids >= 0].tolist()), tokenizer.decode(every.tolist())
