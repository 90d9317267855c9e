#!/usr/bin/env python3
"""Writes src/decorator/generated.rs: every op method of Burn's backend traits, delegated to the wrapped backend.

Run it after a change of the Burn version:

    python3 burn-ep-backend/scripts/generate_decorator.py

The Burn source is found through `cargo metadata`, so the script needs no settings. The test
`decorator::coverage` compares the result with the installed source and fails when a method is missing.
"""

import json
import pathlib
import re
import subprocess

CRATE = pathlib.Path(__file__).resolve().parent.parent
OUTPUT = CRATE / "src" / "decorator" / "generated.rs"

# Op traits and the files that declare them, below src/backend/ops/ of burn-backend.
OP_TRAITS = [
    ("FloatTensorOps", "tensor.rs"),
    ("IntTensorOps", "int_tensor.rs"),
    ("BoolTensorOps", "bool_tensor.rs"),
    ("ModuleOps", "modules/base.rs"),
    ("ActivationOps", "activation.rs"),
    ("QTensorOps", "qtensor.rs"),
    ("TransactionOps", "transaction.rs"),
]

# Methods that go through decorator/routing.rs instead of straight to the wrapped backend.
ROUTED = {"attention", "embedding", "float_matmul", "linear"}

# Methods that wait for the device: each call is counted.
READS = {"float_into_data", "int_into_data", "bool_into_data", "q_into_data", "tr_execute"}

# Result structs that are generic over the backend: rebuilt from their public fields, in the order of `new`.
REBUILT = {
    "MaxPool1dWithIndices": ["output", "indices"],
    "MaxPool2dWithIndices": ["output", "indices"],
    "MaxPool1dBackward": ["x_grad"],
    "MaxPool2dBackward": ["x_grad"],
    "InterpolateBackward": ["x_grad"],
    "DeformConv2dBackward": ["x_grad", "offset_grad", "weight_grad", "mask_grad", "bias_grad"],
}

HEADER = """\
// Written by scripts/generate_decorator.py: do not edit. One line a method, {count} methods.
#![allow(clippy::all)]

use core::future::Future;
use core::ops::Range;

use burn_backend::ops::*;
use burn_backend::quantization::*;
use burn_backend::tensor::{{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor}};
use burn_backend::*;

use super::{{EpBackend, moe, routing}};
use crate::MoeBackend;
"""


def burn_backend_source() -> pathlib.Path:
    """Folder src/backend/ops of the burn-backend that this workspace builds with."""
    command = ["cargo", "metadata", "--format-version", "1"]
    metadata = json.loads(subprocess.run(command, cwd=CRATE, check=True, capture_output=True).stdout)
    manifests = [p["manifest_path"] for p in metadata["packages"] if p["name"] == "burn-backend"]
    if len(manifests) != 1:
        raise SystemExit(f"expected one burn-backend in the dependency graph, found {manifests}")
    return pathlib.Path(manifests[0]).parent / "src" / "backend" / "ops"


def closing(text: str, start: int, pair: str) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == pair[0]:
            depth += 1
        elif text[i] == pair[1]:
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"unbalanced {pair}")


def trait_body(source: str, trait: str) -> str:
    """Text between the braces of a trait, comments removed."""
    source = re.sub(r"//[^\n]*", "", source)
    brace = source.index("{", re.search(rf"pub trait {trait}\b", source).end())
    return source[brace + 1 : closing(source, brace, "{}")]


def signatures(body: str) -> list[str]:
    """Signature of every method declared in a trait body, without its default."""
    found, i = [], 0
    while i < len(body):
        if body[i] == "{":
            i = closing(body, i, "{}")
        elif re.match(r"fn \w", body[i:]) and not re.match(r"\w", body[i - 1]):
            end = closing(body, body.index("(", i), "()")
            while body[end] not in ";{":
                end = closing(body, end, "[]") if body[end] == "[" else end + 1
            found.append(" ".join(body[i:end].split()))
            i = end - 1
        i += 1
    return found


def split_top_level(arguments: str) -> list[str]:
    """Arguments of a list, commas inside brackets left alone."""
    parts, depth, part = [], 0, ""
    for c in arguments:
        depth += (c in "(<[") - (c in ")>]")
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    return [p for p in [*parts, part.strip()] if p]


def inward(name: str, kind: str) -> str:
    """Expression that turns an argument of the decorator's type into the wrapped backend's."""
    if kind == "TensorPrimitive<Self>":
        return f"moe::primitive_in::<B>({name})"
    if kind.startswith("QuantizationParametersPrimitive"):
        return f"QuantizationParametersPrimitive {{ scales: {name}.scales }}"
    if kind.startswith("TransactionPrimitive"):
        fields = ["read_floats", "read_qfloats", "read_ints", "read_bools"]
        return f"TransactionPrimitive::new({', '.join(f'{name}.{f}' for f in fields)})"
    return name


def outward(call: str, kind: str) -> str:
    """Expression that turns the wrapped backend's result into the decorator's."""
    if kind == "TensorPrimitive<Self>":
        return f"moe::primitive_out::<B>({call})"
    struct = kind.split("<")[0]
    if struct in REBUILT:
        fields = ", ".join(f"r.{f}" for f in REBUILT[struct])
        return f"let r = {call}; {struct}::new({fields})"
    return call


def method(signature: str) -> str:
    """One delegating method."""
    name, generics = re.match(r"fn (\w+)\s*(<[^(]*>)?\s*\(", signature).groups()
    start = signature.index("(")
    end = closing(signature, start, "()")
    result = re.sub(r"\bB\b", "Self", signature[end + 1 :].strip().removeprefix("->").strip())
    parameters, values = [], []
    for argument in split_top_level(signature[start + 1 : end]):
        argument_name, kind = (s.strip() for s in argument.split(":", 1))
        argument_name = argument_name.removeprefix("mut ").lstrip("_")
        kind = re.sub(r"\bB\b", "Self", kind).replace("crate::", "burn_backend::")
        parameters.append(f"{argument_name}: {kind}")
        values.append(inward(argument_name, kind))
    target = f"routing::{name}::<B>" if name in ROUTED else f"B::{name}"
    body = outward(f"{target}({', '.join(values)})", result)
    if name in READS:
        body = f"crate::device::note_read(); {body}"
    arrow = f" -> {result}" if result else ""
    return f"    fn {name}{generics or ''}({', '.join(parameters)}){arrow} {{ {body} }}\n"


def main() -> None:
    source, blocks, count = burn_backend_source(), [], 0
    for trait, file in OP_TRAITS:
        methods = [method(s) for s in signatures(trait_body((source / file).read_text(), trait))]
        count += len(methods)
        blocks.append(f"\nimpl<B: MoeBackend> {trait}<Self> for EpBackend<B> {{\n{''.join(methods)}}}\n")
    OUTPUT.write_text(HEADER.format(count=count) + "".join(blocks))
    print(f"{OUTPUT.relative_to(CRATE)}: {count} methods")


if __name__ == "__main__":
    main()
