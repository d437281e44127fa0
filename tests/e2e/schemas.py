"""Random JSON schemas of the kinds that grammars enforce, and what engines write under them.

python -m tests.e2e.schemas --count 1000
python -m tests.e2e.schemas --count 1000 --drafts 2
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dsv4lite import LLM, MTP, RequestOutput, SamplingParams, tiny_model

PATTERNS = ("^[a-c]{2,5}$", "^(?:ab|cd)+-[0-9]{1,3}$", "^[A-Z][a-z]{0,6}$", r"^\+?[0-9]{3}( [0-9]{2}){1,2}$", "x[yz]?w$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
NAMES = ("a", "name", "x-1", "über", 'q"t', "名", "two words", "")


def chain(length: int, wrap: Callable[[dict[str, Any]], dict[str, Any]] = lambda rest: rest) -> dict[str, Any]:
    """Return a schema of definitions of which each refers to the next."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def rules(length: int) -> str:
    """Return a grammar of rules of which each is the next."""
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(length)) + f'r{length}: "a"\n'


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Return a schema that some value of limited size fits; some refer to definitions, which may refer to each other."""
    definitions = [f"d{i}" for i in range(rng.choice((0, 0, 1, 3)))]
    schema = _schema(rng, 3, definitions)
    if definitions:
        schema["$defs"] = {name: _definition(rng, name, definitions[i + 1 :]) for i, name in enumerate(definitions)}
    return schema


def _definition(rng: random.Random, name: str, later: Sequence[str]) -> dict[str, Any]:
    if rng.random() < 0.3:  # a list that ends anywhere
        rest = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
        return _closed({"value": _schema(rng, 0, later), "next": rest}, ["value", "next"])
    return _schema(rng, 1, later)


def _closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(rng: random.Random, depth: int, definitions: Sequence[str]) -> dict[str, Any]:
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"enum": [_value(rng, 1) for _ in range(rng.randint(1, 4))]},
        lambda: {"const": _value(rng, 2)},
        lambda: {"type": rng.choice(("boolean", "null"))},
        lambda: _integer(rng),
        lambda: _number(rng),
        lambda: _string(rng),
        lambda: {"type": ["null", "integer"], "minimum": -5, "maximum": 5},
    ]
    if definitions:
        kinds += [lambda: {"$ref": f"#/$defs/{rng.choice(definitions)}"}] * 3
    if depth:
        kinds += [lambda: _object(rng, depth - 1, definitions)] * 6
        kinds += [lambda: _array(rng, depth - 1, definitions)] * 4
        kinds += [lambda: {"anyOf": [_schema(rng, depth - 1, definitions) for _ in range(rng.randint(1, 3))]}] * 2
    return rng.choice(kinds)()


def _value(rng: random.Random, depth: int) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice((None, True, False, "", "yes", "a\nb", "é", '"')),
        lambda: rng.randint(-1000, 1000),
        lambda: rng.choice((0.5, -2.25, 1e-3)),
    ]
    if depth:
        kinds.append(lambda: [_value(rng, depth - 1) for _ in range(rng.randint(0, 2))])
        kinds.append(lambda: {rng.choice(NAMES): _value(rng, depth - 1) for _ in range(rng.randint(0, 2))})
    return rng.choice(kinds)()


def _bounds(rng: random.Random, low: float, high: float) -> dict[str, Any]:
    lower = {rng.choice(("minimum", "exclusiveMinimum")): low} if rng.random() < 0.8 else {}
    return {**lower, **({rng.choice(("maximum", "exclusiveMaximum")): high} if rng.random() < 0.8 else {})}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-300, 300)
    if rng.random() < 0.3:
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(9, 900), "multipleOf": rng.choice((2, 3, 9))}
    return {"type": "integer", **_bounds(rng, low, low + rng.randint(2, 900))}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.choice((-10, -0.5, 0, 1.25, 300))  # multiples have few digits; a model may write any number of them otherwise
    return {"type": "number", "multipleOf": rng.choice((0.25, 0.5)), **_bounds(rng, low, low + rng.choice((1, 3, 1000)))}


def _string(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 30}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _object(rng: random.Random, depth: int, definitions: Sequence[str]) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema = _closed({name: _schema(rng, depth, definitions) for name in names}, [n for n in names if rng.random() < 0.5])
    if rng.random() < 0.1:
        schema["patternProperties"] = {"^k[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}}
    return schema


def _array(rng: random.Random, depth: int, definitions: Sequence[str]) -> dict[str, Any]:
    if rng.random() < 0.2:
        first = [_schema(rng, depth, definitions) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": rng.randint(0, len(first))}
    least = rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, depth, definitions), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def problem_of(schema: dict[str, Any], output: RequestOutput) -> str | None:
    """Return what is wrong with an output that has ended by itself, by a validator that shares nothing with the grammars."""
    from jsonschema import Draft202012Validator, ValidationError

    if output.error is not None:
        return repr(output.error)
    # Names that only a pattern allows may come twice: the grammar does not remember them.
    hook = dict if "patternProperties" in json.dumps(schema) else _no_repeats
    try:
        Draft202012Validator(schema).validate(json.loads(output.text, object_pairs_hook=hook))
    except (ValueError, AssertionError, ValidationError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    except OverflowError:  # a number that no float holds, which the validator cannot divide
        return None
    return None


def run(llm: LLM, schemas: Sequence[dict[str, Any]], max_tokens: int) -> list[RequestOutput]:
    """Return an output for each schema."""
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=i, structured_outputs={"json": schema})
        for i, schema in enumerate(schemas)
    ]
    return llm.generate_batch([f"# {i}\nx = " for i in range(len(schemas))], params, on_error="return")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=700)
    args = parser.parse_args()
    schemas = [random_schema(random.Random(args.seed + i)) for i in range(args.count)]
    speculative = MTP(args.drafts) if args.drafts else None
    with LLM(tiny_model(), device="cpu", max_model_len=1024, max_num_seqs=32, speculative=speculative) as llm:
        outputs = run(llm, schemas, args.max_tokens)
    found = Counter("error" if output.error else output.outputs[0].finish_reason for output in outputs)
    wrong = 0
    for schema, output in zip(schemas, outputs, strict=True):
        if output.error is None and output.outputs[0].finish_reason == "length":
            print("LENGTH", json.dumps(schema)[:600], repr(output.text[:200]), repr(output.text[-100:]))
        elif problem := problem_of(schema, output):
            wrong += 1
            print("WRONG", problem, json.dumps(schema), repr(output.text))
    print(dict(found), f"{wrong} wrong, {sum(output.usage.completion_tokens for output in outputs):,} tokens")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
