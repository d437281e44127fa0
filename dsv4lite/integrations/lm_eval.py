"""An engine as a model of EleutherAI's evaluation harness; written for lm-eval 0.4.13.

The harness has no entry point for models, so a program imports this module, or names it in place of ``lm_eval``:

    python -m dsv4lite.integrations.lm_eval run --model dsv4lite --model_args model=PATH --tasks hellaswag

Log-likelihoods are those of ``score``, texts those of ``generate``, or of ``chat`` with ``--apply_chat_template``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dsv4lite.config import EngineSettings
from dsv4lite.errors import UnsupportedError
from dsv4lite.llm import LLM
from dsv4lite.request import SamplingParams


class Conversation(str):
    """Messages as JSON text: what the harness passes on as a prompt when it applies a chat template."""


@register_model("dsv4lite")
class Model(TemplateLM):
    """Scores and generates by an engine, which batches requests by itself.

    A text longer than the engine's ``max_model_len`` loses its beginning, as with the harness's other models, but one token of the
    context stays. An answer has at most ``max_model_len - 1`` tokens. A conversation is not cut.
    """

    def __init__(
        self,
        model: str | LLM,
        *,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Take an engine that has started, or start one; ``llm.close()`` ends it, as does the end of the program.

        Args:
            model: An engine, or a folder or hub id.
            max_gen_toks: Most tokens of an answer where the task does not say.
            batch_size: Given by the harness, and without effect: the engine has ``max_num_seqs``.
            max_batch_size: As ``batch_size``.
            **settings: Fields of ``EngineConfig``.
        """
        super().__init__()
        self.llm = model if isinstance(model, LLM) else LLM.create(model, **settings)
        self.max_gen_toks = max_gen_toks
        self.max_length = self.llm.memory().max_model_len

    @property
    def eot_token_id(self) -> int:
        """The id of the end of a text."""
        tokenizer = self.llm.tokenizer
        assert tokenizer.eos_token_id is not None, "a model that is evaluated has an end-of-sequence token"
        return tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: the beginning of a text, if the model has one."""
        begin = self.llm.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Encode a text, with a first token where the checkpoint wants one."""
        tokenizer = self.llm.tokenizer
        return tokenizer.encode(string, add_bos=tokenizer.add_bos_token if add_special_tokens is None else add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        """The model's name, by which the harness tells cached requests apart."""
        return self.llm.config.model

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Conversation:
        """Return the messages for ``chat``, which writes them in the model's own format.

        Raises:
            UnsupportedError: The task also gives the beginning of the answer.
        """
        if not add_generation_prompt:
            raise UnsupportedError("dsv4lite with lm-eval: gen_prefix with a chat template; leave --apply_chat_template out")
        return Conversation(json.dumps(chat_history))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would have written it.

        Raises:
            UnsupportedError: The context is a conversation.
        """
        if any(isinstance(request.args[0], Conversation) for request in requests):
            raise UnsupportedError("dsv4lite with lm-eval: log-likelihoods with a chat template; leave --apply_chat_template out")
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        cut = [(context, ids[1 - self.max_length :]) for _, context, ids in requests]
        scores = self.llm.score_batch([(context[len(ids) - self.max_length :], ids) for context, ids in cut])
        return [(float(found.sampled.sum()), bool((found.ranks == 1).all())) for found in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, cut into windows of the engine's length."""
        counts, windows = [], []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            cut = get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1)
            found = [(None, *make_disjoint_window(pair)) for pair in cut]
            counts.append(len(found))
            windows.extend(found)
        scores = iter([value for value, _ in self._loglikelihood_tokens(windows)])
        return [sum(next(scores) for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its strings, greedily unless the task samples.

        Raises:
            ContextLengthError: A conversation and its answer are longer than ``max_model_len``.
            InvalidRequestError: The task has a setting that ``SamplingParams`` does not.
        """
        contexts, params = [], []
        for context, given in (request.args for request in requests):
            settings = {**normalize_gen_kwargs(given, self.max_gen_toks)}
            if not settings.pop("do_sample"):
                settings["temperature"] = 0.0
            settings["max_tokens"] = min(settings.pop("max_gen_toks"), self.max_length - 1)  # a prompt has at least one token
            settings["stop"] = [text for text in settings.pop("until") if text]
            contexts.append(context)
            params.append(SamplingParams.from_dict(settings))
        with ThreadPoolExecutor(2 * self.llm.config.max_num_seqs) as threads:
            return list(threads.map(self._answer, contexts, params))

    def _answer(self, context: str, params: SamplingParams) -> str:
        if isinstance(context, Conversation):
            return self.llm.chat(json.loads(context), params).text
        assert params.max_tokens is not None
        return self.llm.generate(self.tok_encode(context)[params.max_tokens - self.max_length :], params).text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
