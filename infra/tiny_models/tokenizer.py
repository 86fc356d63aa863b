"""The tiny models' tokenizer: byte-level BPE with single digits, and one token per phrase that every prompt repeats.

Episodes must be short to train on two CPU cores, and most of a tool-use prompt is boilerplate. So each fixed stretch
of the chat template, of a tool schema and of a user's question is one token (an added token, not a special one).
Identifiers and words are BPE tokens, and spaces and digits stand alone. So a name or a number has the same tokens
wherever it is copied from. The text is plain Qwen3 format, which any Qwen3 tool parser reads.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from infra.tiny_models.demonstrate import hint_corpus
from orchestrator.environments.toolsmith.taskset import ARGUMENT_NAMES, OPERATIONS, generate

CONTEXT_LENGTH = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'
    "\n</tool_call>"
)
_SCHEMA = (
    '\n{"type": "function", "function": {"name": "',
    '": {"type": "integer"}, "',
    '": {"type": "string"}, "',
    '": {"type": "integer"}}, "required": ["',
    '": {"type": "string"}}, "required": ["',
    '", "',
    '"]}}}',
)
_SCHEMA_MIDDLE = '", "description": "{}", "parameters": {{"type": "object", "properties": {{"'
_CALL = ('\n{"name": "', '", "arguments": {"', '": "', '": ', ', "', '"}}\n', '"}\n', "}}\n", "}\n")
_QUESTION = (" and ", ", then ", " from ", " by ", "ake the larger of ", "that and ")
_MERGE_LIMIT = 1024


def phrases() -> list[str]:
    """Return the fixed stretches of text that are one token each."""
    middles = [_SCHEMA_MIDDLE.format(operation.description) for operation in OPERATIONS]
    return [HEADER, FOOTER, *_SCHEMA, *middles, *_CALL, *_QUESTION]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on toolsmith's own words. The result is the same on every run."""
    return train_tokenizer(_corpus(), phrases())


def train_tokenizer(corpus: Iterable[str], phrases: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer. `phrases`: stretches of text that are one token each."""
    core = Tokenizer(models.BPE())
    pieces = Regex(r"[A-Za-z_]+|[0-9]| |\n|[^A-Za-z_0-9 \n]+")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MERGE_LIMIT,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
    )
    core.train_from_iterator(corpus, trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*MARKERS, *phrases)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TEMPLATE.read_text()
    return tokenizer


def _corpus() -> list[str]:
    names = [name for operation in OPERATIONS for name in operation.names]
    arguments = [name for group in itertools.chain(*ARGUMENT_NAMES.values()) for name in group]
    words = [*names, *arguments, "integer", "string", "number", "object", "null", "system", "user", "assistant"]
    questions = [generate(seed=seed, difficulty=1 + seed % 3, split="train").question for seed in range(200)]
    return [*words * 50, *questions, *hint_corpus()]
