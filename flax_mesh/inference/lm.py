"""lm-eval's `LM` over a trained decoder. Lengths, windows and the first token are as in lm-eval's own model `hf`.

It subclasses a class of lm_eval; import this module where it is used.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

from flax_mesh.data.tokenizers.chat import ChatTokenizer
from flax_mesh.data.tokenizers.chat import open_tokenizer as open_chat_tokenizer
from flax_mesh.errors import ConfigError, Mistakes
from flax_mesh.inference.scores import score
from flax_mesh.inference.tokenizer import named_token
from flax_mesh.inference.trained import TrainedModel, finite_problem
from flax_mesh.models import Sampling, generate
from flax_mesh.models.generation.memory import check_cache

DEFAULT_LENGTH, DEFAULT_TOKENS = 2048, 256  # of lm-eval, for folders and for tasks that name none
END_OF_BYTES = 0  # the token between texts for a model of bytes
CHECKED = 8  # a text is searched for its end whenever it has so many tokens more
WITHOUT_EFFECT = {"num_beams": 1, "use_cache": True, "repetition_penalty": 1.0}
SUPPORTED = "until, max_gen_toks, do_sample, temperature, top_k and top_p"
REPAIR = "try model.dtype=float32, or another step"


class _Options(NamedTuple):
    until: list[str]
    max_tokens: int
    sampling: Sampling


class TrainedLM(TemplateLM):
    """A trained decoder as a model of lm-eval. `say` is called with notes.

    Raises a ConfigError if the model has no tokenizer, or no token that can precede a text.
    """

    eot_token_id: int = END_OF_BYTES
    prefix_token_id: int = END_OF_BYTES

    def __init__(
        self, trained: TrainedModel, batch_size: int, max_length: int | None, say: Callable[[str], object]
    ) -> None:
        super().__init__()
        source = trained.source
        if (tokenizer := trained.tokenizer) is None:
            raise ConfigError(f"tasks are texts, but {source.path} has no tokenizer.json; add the file")
        self._trained, self._tokens, self._batch_size, self._say = trained, tokenizer, batch_size, say
        self.max_length = max_length or source.sequence_length or DEFAULT_LENGTH
        first, last = (named_token(source, tokenizer, name) for name in ("bos_token", "eos_token"))
        stops = [*([last[1]] if last else []), *trained.stop_tokens, *([END_OF_BYTES] if tokenizer.is_bytes else [])]
        self._first, self._stops = first or last, list(dict.fromkeys(stops))
        ids = [*([self._first[1]] if self._first else []), *tokenizer.encode("").tokens.tolist(), *stops]
        if not ids:
            raise ConfigError(f"{source.files} must name a bos_token or an eos_token in tokenizer_config.json")
        self.prefix_token_id, self.eot_token_id = ids[0], [*stops, ids[0]][0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        has_first = self._first is not None and string.startswith(self._first[0])
        special = not has_first if add_special_tokens is None else add_special_tokens
        return self._tokens.encode(string, special=special).tokens.tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        counts = [len(rest) for *_, rest in requests]
        if wrong := [count for count in counts if not 0 < count <= self.max_length]:
            must = f"have 1 to {self.max_length} tokens, the length of the model, got {min(wrong)} to {max(wrong)}"
            raise ConfigError(f"{len(wrong)} continuations must {must}; repair or leave out the task")
        texts = self._fitting(
            [(context or [self.prefix_token_id]) + rest for _, context, rest in requests], self.max_length + 1
        )
        with tqdm(desc="batches of texts", disable=None) as bar:
            arguments = self._trained.model, self._trained.mesh, texts, counts, self._batch_size
            scores = score(*arguments, lambda _: bar.update())
        if count := sum(not abs(log_prob) < float("inf") for log_prob, _ in scores):
            self._say(f"warning: {count} log-likelihoods are not finite; {REPAIR}")
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[float]:
        options = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length, "context_len": 1}
        windows = [
            [
                (None, *make_disjoint_window(pair))
                for pair in get_rolling_token_windows(self.tok_encode(text), **options)
            ]
            for text in (request.args[0] for request in requests)
        ]
        log_probs = iter(self._loglikelihood_tokens(list(chain.from_iterable(windows))))
        return [sum(next(log_probs)[0] for _ in pairs) for pairs in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[str]:
        groups: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(n)
        options, texts, mistakes = dict[str, _Options](), [""] * len(requests), Mistakes()
        for key, ids in groups.items():
            with mistakes:
                options[key] = self.options(requests[ids[0]].args[1])
        mistakes.raise_if_any()
        for key, ids in groups.items():
            for n, text in zip(ids, self._texts([requests[n].args[0] for n in ids], options[key]), strict=True):
                texts[n] = text
        return texts

    def options(self, given: Mapping[str, object]) -> _Options:
        """The `generation_kwargs` of a task. Raises one ConfigError for all that are not supported."""
        settings = dict(normalize_gen_kwargs(given, DEFAULT_TOKENS))
        until, max_tokens, is_sampled = (settings.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
        defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        values = [settings.pop(name, default) for name, default in defaults.items()]
        sampling = Sampling(*values) if is_sampled else Sampling()
        others = {name: value for name, value in settings.items() if value != WITHOUT_EFFECT.get(name)}
        problems = [*map(str, sampling.problems())]
        problems += [f"{name}={value!r} is not supported; use {SUPPORTED}" for name, value in others.items()]
        if not 0 < max_tokens < self.max_length:
            problems.append(
                f"max_gen_toks must be from 1 to {self.max_length - 1}, as the model allows, got {max_tokens}"
            )
        if wrong := [text for text in until if not isinstance(text, str)]:
            problems.append(f"until must be texts, got {wrong[0]!r}")
        if problems:
            raise ConfigError([f"generation_kwargs: {problem}" for problem in problems])
        return _Options([text for text in until if text], max_tokens, sampling)

    def _texts(self, prompts: Sequence[str], options: _Options) -> list[str]:
        """The texts after prompts, up to the first of `options.until`."""
        encoded = [self.tok_encode(prompt) or [self.prefix_token_id] for prompt in prompts]
        rows = self._fitting(encoded, self.max_length - options.max_tokens)
        sizes = {"max_tokens": options.max_tokens, "batch_size": self._batch_size, "cache_length": None}
        check_cache(self._trained.config, self._trained.mesh, list(map(len, rows)), **sizes)
        tokens: list[list[int]] = [[] for _ in rows]

        def ends(n: int, token: int) -> bool:
            tokens[n].append(token)
            is_checked = options.until and len(tokens[n]) % CHECKED == 0
            return bool(is_checked) and any(end in self._tokens.decode(tokens[n]) for end in options.until)

        with tqdm(total=len(rows), desc="texts", disable=None) as bar:
            calls = {"on_token": ends, "on_result": lambda *_: bar.update()}
            results = generate(
                self._trained.model, rows, sampling=options.sampling, stop_tokens=self._stops, **sizes, **calls
            )
        if warning := finite_problem([f"request {n}" for n in range(len(rows))], results):
            self._say(f"warning: {warning}; {REPAIR}")
        shown = [result.tokens[: -1 if result.stopped else None].tolist() for result in results]
        return [postprocess_generated_text(self._tokens.decode(ids), options.until, None) for ids in shown]

    def _fitting(self, texts: Sequence[list[int]], most: int) -> list[list[int]]:
        """The last `most` tokens of every text."""
        if count := sum(len(text) > most for text in texts):
            what = f"{count} of {len(texts)} texts have more than {most} tokens, and lose their first ones"
            self._say(f"warning: {what}; the length of the model is {self.max_length}")
        return [text[-most:] for text in texts]

    @cached_property
    def _chat(self) -> ChatTokenizer:
        source = self._trained.source
        tokenizer = None if self._tokens.is_bytes else open_chat_tokenizer(str(source.files), source.model.vocab_size)
        if tokenizer is None or not tokenizer.chat_template:
            raise ConfigError(f"{source.files} has no chat template; leave out apply_chat_template, or add one")
        return tokenizer

    def apply_chat_template(self, chat_history: Sequence[object], add_generation_prompt: bool = True) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        chat = self._chat
        try:
            return str(chat.apply_chat_template(chat_history, tokenize=False, return_dict=False, **options))
        except ValueError as error:
            raise ConfigError(f"the chat template of {chat.path} cannot be applied to a request: {error}") from error

    @property
    def tokenizer_name(self) -> str:
        return str(self._trained.source.files).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if isinstance(chat_template, str):
            raise ConfigError(f"apply_chat_template must be True, which applies the folder's, got {chat_template!r}")
        return self._chat.get_chat_template() if chat_template else None
