"""Over 400 invalid commands, with the exit code and the part of the error that names the mistake.

`COMMANDS` has one line for each: the exit code, the command, and a text that the error must contain. `SETTINGS` has the
invalid values of every setting; each is one more command. Words in braces are the files of `write_files`.
"""

import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np

RECIPES = {
    "syntax": "def recipe(:\n    return 1\n",
    "indent": "def recipe():\nreturn 1\n",
    "null": "def recipe():\n    return 1\n\0",
    "raises": "def recipe():\n    raise KeyError('nothing')\n",
    "raises_at_import": "x = 1\ny = x / 0\n",
    "asserts": "def recipe():\n    assert False\n",
    "imports": "import no_such_package_at_all\n",
    "imports_name": "from flax_mesh import no_such_name\n",
    "exits": "import sys\nsys.exit(0)\n",
    "exits_later": "import sys\ndef recipe():\n    sys.exit('bye')\n",
    "interrupts": "def recipe():\n    raise SystemExit\n",
    "recurses": "def recipe():\n    return recipe()\n",
    "wrong_type": "def recipe():\n    return {'model': 1}\n",
    "none": "def recipe():\n    pass\n",
    "argument": "def recipe(size):\n    return size\n",
    "not_a_function": "recipe = 3\n",
    "a_class": "class recipe:\n    pass\n",
    "empty": "",
}
LOSSES = {
    "loss_none": "return None",
    "loss_raises": "raise RuntimeError('no loss today')",
    "loss_vector": "return model(batch['inputs']).sum(-1), 1.0",
    "loss_text": "return 'high', 1.0",
    "loss_key": "return batch['labels'].sum(), 1.0",
    "loss_shape": "return (batch['inputs'] @ batch['inputs']).sum(), 1.0",
}
LOSS_RECIPE = """
import dataclasses
from flax_mesh.train import load_recipe


def loss(model, batch):
    {body}


def recipe():
    return dataclasses.replace(load_recipe({recipe!r}), loss_fn=loss)
"""
MODEL_RECIPE = """
import dataclasses
from flax_mesh.train import load_recipe


def make(config, rngs):
    {body}


def recipe():
    return dataclasses.replace(load_recipe({recipe!r}), make_model=make)
"""
MODELS = {
    "model_none": "return None",
    "model_raises": "raise OSError('no weights')",
    "model_text": "return 'a model'",
}
BATCH_RECIPE = """
import dataclasses
import numpy as np
from flax_mesh.train import load_recipe


def make(config):
    tokens = np.zeros((config.data.batch_size, config.data.sequence_length), np.int32)
    {body}


def recipe():
    return dataclasses.replace(load_recipe({recipe!r}), make_batches=make, sample=None)
"""
BATCHES = {
    "batches_none": "return None",
    "batches_raise": "raise OSError('no images')",
    "batches_list": "return [tokens]",
    "batches_iterator": "return iter([tokens])",
    "batch_none": "return lambda step: None",
    "batch_raises": "return lambda step: tokens[step, step, step]",
    "batch_rows": "return lambda step: {'inputs': tokens[1:], 'targets': tokens[1:]}",
    "batch_scalar": "return lambda step: {'inputs': tokens, 'targets': 1.0}",
    "batch_text": "return lambda step: {'inputs': tokens.astype(str), 'targets': tokens}",
    "batch_large": "return lambda step: {'inputs': tokens.astype(np.int64) + 2**40, 'targets': tokens}",
    "batch_key": "return lambda step: {'images': tokens}",
}
EVAL_RECIPE = """
import dataclasses
from flax_mesh.train import load_recipe


def evaluate_all(config, evaluate):
    {body}


def recipe():
    return dataclasses.replace(load_recipe({recipe!r}), eval_fns={{"own": evaluate_all}})
"""
EVALS = {
    "eval_none": "return None",
    "eval_raises": "raise OSError('no images')",
    "eval_text": "return {'loss': 'high'}",
    "eval_name": "return {'a/b': 1.0}",
    "eval_batch": "return evaluate(None)",
}

RECIPE = """
import dataclasses
from tests.checkpoint.small_decoder import recipe as other


def recipe():
    return dataclasses.replace(other(), data=dataclasses.replace(other().data, source={tokens!r}))
"""

NUMBERS = ["", "x", "nan", "-inf", "1,2", "none", "0x10", "--"]
COUNTS = ["", "x", "nan", "inf", "-1", "1.5", "1e3", "1,2", "none", "true"]
NAMES = ["", "nope", "0"]

SETTINGS = {
    "run.steps": [*COUNTS, "0"],
    "run.seed": ["", "x", "nan", "-1", "1.5", "4294967296", "99999999999999999999999"],
    "run.eval_every": COUNTS,
    "run.sample_tokens": COUNTS,
    "run.spike_factor": [*NUMBERS, "0.5", "1", "-2"],
    "run.on_nonfinite": NAMES,
    "run.hardware": ["{nothing}", "{text}", "{no_files}", "~nobody-of-this-name/x", "x" * 300],
    "run.platform": ["", "npu", "cpu:0", "cpu:-1", "cpu:x", "CPU"],
    "run.folder": ["", "/dev/null/run", "{text}", "{text}/run", "~nobody-of-this-name/run", "x" * 300, "y/" * 2500],
    "run.compiler_options": ["x", "=1", "--xla=1", "a=1,a=2", "no_such_option_of_xla=1"],
    "optimizer.learning_rate": [*NUMBERS, "-1", "inf"],
    "optimizer.end_learning_rate": [*NUMBERS, "-1", "inf"],
    "optimizer.b1": [*NUMBERS, "2", "1", "-1", "inf"],
    "optimizer.b2": [*NUMBERS, "2", "1", "-1", "inf"],
    "optimizer.epsilon": [*NUMBERS, "-1", "inf"],
    "optimizer.weight_decay": [*NUMBERS, "-1", "inf"],
    "optimizer.clip_norm": [*NUMBERS, "0", "-1"],
    "optimizer.warmup_steps": [*COUNTS, "1000000"],
    "optimizer.decay_steps": [*COUNTS, "0"],
    "optimizer.name": NAMES,
    "optimizer.schedule": NAMES,
    "optimizer.decay_start": ["", "x", "1.5", "-1", "10"],
    "optimizer.momentum": ["", "x", "-1", "1", "0.9"],
    "optimizer.moment_dtype": [*NAMES, "float16"],
    "optimizer.no_decay": ["(", "[", "nothing"],
    "optimizer.groups": ["embed", "( frozen", ". frozen", "nothing frozen", "embed learning_rate*-1", "embed x"],
    "optimizer.matrices": ["kernel", "("],
    "optimizer.ema": [*NUMBERS, "-1", "1", "inf"],
    "optimizer.shard_over": ["nope", "pp", "dp,nope"],
    "optimizer.memory": NAMES,
    "run.hooks": ["nope", "tensorbord", "no.such.module.f", "os.path.nope", "math.pi", "os.getcwd", ".x", "a..b"],
    "run.profile": [*COUNTS, "1000000"],
    "run.compilation_cache": ["", "yes", "1", "none"],
    "checkpoint.every": [*COUNTS, "0"],
    "checkpoint.keep": [*COUNTS, "0"],
    "checkpoint.keep_best": COUNTS,
    "checkpoint.keep_every": COUNTS,
    "checkpoint.compress": ["", "yes", "1", "none"],
    "checkpoint.on_failure": NAMES,
    "checkpoint.start_from": ["{nothing}", "{text}", "{no_files}", "~nobody-of-this-name/x", "x" * 300],
    "data.source": ["{nothing}", "{no_files}", "{no_files}/*.txt", "{matrix}", "{floats}", "{odd}", "x" * 300, ""],
    "data.sequence_length": [*COUNTS, "0", "1000000000"],
    "data.batch_size": [*COUNTS, "0", "3"],
    "data.held_out": [*NUMBERS, "-0.1", "1", "2", "inf"],
    "data.seed": ["", "x", "1.5", "-1"],
    "data.eval_batches": [*COUNTS, "0"],
    "mesh.shape": ["dp", "dp:x", "dp:0", "dp:-2", "dp:3", "dp:16", "nope:2", "dp:2,dp:4", "dp:-1,tp:-1", "pp:-1"],
    "mesh.rules": ["nope", "pp", "fsdp+nope", "+", "fsdp,dp"],
    "pipeline.num_microbatches": [*COUNTS, "0", "3"],
    "pipeline.schedule": ["nope", ""],
    "pipeline.cut": ["", "nope", "0", "2,1", "2,2", "9", "1.5", "-1"],
    "pipeline.num_virtual_stages": ["", "x", "0", "-1", "1.5"],
    "pipeline.remat": NAMES,
    "pipeline.transport": NAMES,
    "pipeline.check": NAMES,
    "model.vocab_size": [*COUNTS, "0"],
    "model.hidden_size": [*COUNTS, "0"],
    "model.num_layers": [*COUNTS, "0"],
    "model.num_heads": [*COUNTS, "0", "3"],
    "model.num_kv_heads": [*COUNTS, "0", "3"],
    "model.head_dim": [*COUNTS, "0", "3"],
    "model.mlp_size": [*COUNTS, "0"],
    "model.num_experts": COUNTS,
    "model.rope_theta": [*NUMBERS, "0", "-1", "inf"],
    "model.rope_factor": [*NUMBERS, "0", "-1", "inf"],
    "model.norm_epsilon": [*NUMBERS, "-1", "inf"],
    "model.dtype": [*NAMES, "int32", "float99"],
    "model.param_dtype": [*NAMES, "int32"],
    "model.attention": NAMES,
    "model.remat": [*NAMES, "full:77", "full:99,none", "full:0,none", "full:x", "attention+nope", "full,none", "q+q"],
    "model.loss_chunk": COUNTS,
    "model.scan": ["", "yes", "1"],
    "model.tied": ["", "yes", "1"],
    "model.axes.batch_axis": ["nope", "dp,nope"],
}  # fmt: skip
MORE = {  # settings that a value needs to matter
    "pipeline.schedule": "mesh.shape=pp:2,dp:4 pipeline.num_microbatches=4 data.batch_size=16",
    "pipeline.cut": "mesh.shape=pp:2,dp:4 pipeline.num_microbatches=4 data.batch_size=16",
    "pipeline.num_virtual_stages": "mesh.shape=pp:2,dp:4 pipeline.num_microbatches=4 data.batch_size=16",
}

COMMANDS = """
2 | | COMMAND
2 | nope | nope
2 | train | RECIPE
2 | train {recipe} nonsense | nonsense
2 | train {recipe} =1 | setting
2 | train {recipe} run.stps=1 | did you mean run.steps
2 | train {recipe} optimizer.lr=1 | optimizer.learning_rate
2 | train {recipe} run=1 | run
2 | train {recipe} run.steps.x=1 | run.steps.x
2 | train {recipe} run.steps=1 run.steps=2 | set twice
2 | train {recipe} --bogus | --bogus
2 | train {recipe} @{nothing} | cannot be read
2 | train {recipe} @{no_files} | cannot be read
2 | train {recipe} @{binary} | UTF-8
2 | train {recipe} @ | cannot be read
2 | train {nothing} | no such file
2 | train {nothing}.py | no such file
2 | train {text} | not a Python file
2 | train {no_files} | no such file
2 | train {recipe}:nope | nope
2 | train "" | recipe
2 | train {recipe} --step-timeout 0 | --step-timeout
2 | train {recipe} --step-timeout -1 | --step-timeout
2 | train {recipe} --step-timeout nan | --step-timeout
2 | train {recipe} --step-timeout x | --step-timeout
2 | train {recipe} --trace {out} | --trace
2 | train {recipe} --trace {nothing}/x.json | --trace
2 | train {recipe} --process nonsense | --process
2 | train {recipe} --process 0/1@127.0.0.1 | --process
2 | train {recipe} --process 0/1@127.0.0.1:x | --process
2 | train {recipe} --process 0/1@127.0.0.1:0 | --process
2 | train {recipe} --process 0/1@127.0.0.1:-5 | --process
2 | train {recipe} --process 0/1@127.0.0.1:65536 | --process
2 | train {recipe} --process 0/2@127.0.0.1:99999999999 | --process
2 | train {recipe} --process 2/2@127.0.0.1:4000 | --process
2 | train {recipe} --process -1/2@127.0.0.1:4000 | --process
2 | train {recipe} --process 0/0@127.0.0.1:4000 | --process
2 | train {recipe} --devices-per-process 0 | device
2 | train {recipe} --devices-per-process x | --devices-per-process
2 | generate | DIR
2 | generate {run} | there is no prompt
2 | generate {nothing} --prompt a | not a folder
2 | generate {no_files} --prompt a | no checkpoint
2 | generate {text} --prompt a | not a folder
2 | generate {long} --prompt a |
2 | generate "" --prompt a | is empty
2 | generate {run} --prompt a --bogus | --bogus
2 | generate {run} --prompt a | no tokenizer
2 | generate {run} --prompts {nothing} | cannot be read
2 | generate {run} --prompts {no_files} | cannot be read
2 | generate {run} --prompts {binary} | UTF-8
2 | generate {run} --prompts {long} | --prompts
2 | generate {run} --prompts "" | --prompts
2 | generate {run} --prompt a --step 7 | no step 7
2 | generate {run} --prompt a --step x | --step
2 | generate {run} --prompt a --max-tokens x | --max-tokens
2 | generate {run} --prompt a --max-tokens 0 | --max-tokens
2 | generate {run} --prompt a --max-tokens 99999999999999999999 | --max-tokens
2 | generate {run} --prompt a --temperature nan | --temperature
2 | generate {run} --prompt a --temperature -1 | --temperature
2 | generate {run} --prompt a --temperature x | --temperature
2 | generate {run} --prompt a --top-k -1 | --top-k
2 | generate {run} --prompt a --top-p 0 | --top-p
2 | generate {run} --prompt a --top-p nan | --top-p
2 | generate {run} --prompt a --seed -1 | --seed
2 | generate {run} --prompt a --batch-size 0 | --batch-size
2 | generate {run} --prompt a --cache-length 0 | --cache-length
2 | generate {run} --prompt a --stop 99 | --stop 99
2 | generate {run} --prompt a --stop a | --stop 'a'
2 | generate {run} --prompt a --out {nothing}/x.jsonl | cannot be written
2 | generate {run} --prompt a --out {no_files} | cannot be written
2 | generate {run} --prompt a nonsense | nonsense
2 | generate {run} --prompt a run.steps=1 | no effect here
2 | generate {run} --prompt a run.stps=1 | run.steps
2 | generate {run} --prompt a mesh.shape=pp:2 | no pipeline
2 | generate {run} --prompt a mesh.shape=pp:-1 | no pipeline
2 | generate {run} --prompt a mesh.shape=dp:0 | mesh.shape
2 | generate {run} --prompt a mesh.shape=nope:2 | mesh.shape
2 | generate {run} --prompt a mesh.rules=nope | mesh.rules
2 | generate {run} --prompt a run.platform=npu | run.platform
2 | generate {run} --prompt a model.head_dim=3 | model.head_dim
2 | generate {run} --prompt a model.dtype=int8 | model.dtype
2 | generate {run} --prompt a @{nothing} | cannot be read
3 | generate {damaged} --prompt a | damaged
3 | generate {truncated} --prompt a | metadata
3 | generate {deep} --prompt a | metadata
3 | generate {not_json} --prompt a | metadata
3 | generate {hf_text} --prompt a | config.json
2 | generate {hf_list} --prompt a | config.json
2 | generate {hf_unknown} --prompt a | gpt_nope
2 | generate {hf_types} --prompt a | hidden_size
2 | generate {hf_huge} --prompt a |
2 | evaluate | DIR
2 | evaluate {run} | there is no data
2 | evaluate {nothing} --data stdlib | not a folder
2 | evaluate {no_files} --data stdlib | no checkpoint
2 | evaluate {run} --data "" | empty
2 | evaluate {run} --data {nothing} | does not exist
2 | evaluate {run} --data a={nothing} | does not exist
2 | evaluate {run} --data {no_files} | text files
2 | evaluate {run} --data {matrix} | 1-D
2 | evaluate {run} --data {floats} | integers
2 | evaluate {run} --data {odd} | --bin-dtype
2 | evaluate {run} --data {long} | --data
2 | evaluate {run} --data {text} | no tokenizer
2 | evaluate {run} --data a=x --data a=y | the name a
2 | evaluate {run} --data {tokens} --bin-dtype int8 | --bin-dtype
2 | evaluate {run} --data {tokens} --sequence-length 0 | --sequence-length
2 | evaluate {run} --data {tokens} --batch-size x | --batch-size
2 | evaluate {run} --data {tokens} --max-tokens 1 | 1 token
2 | evaluate {run} --data {tokens} mesh.shape=pp:2 | no pipeline
2 | evaluate {run} --data {tokens} data.seed=1 | no effect here
3 | evaluate {damaged} --data {tokens} |
2 | launch | --processes
2 | launch -n 2 | RECIPE
2 | launch -n 0 -- train {recipe} | -n
2 | launch -n -1 -- train {recipe} | -n
2 | launch -n x -- train {recipe} | --processes
2 | launch -n 2 -- explain {recipe} | train
2 | launch -n 2 --devices-per-process 0 -- train {recipe} | --devices-per-process
2 | launch -n 2 --bogus -- train {recipe} |
2 | explain | RECIPE
2 | explain {nothing} | no such file
2 | explain {recipe} --html | --html
2 | explain {recipe} --html {nothing}/x.html | cannot be written
2 | explain {recipe} --html {no_files} | cannot be written
2 | explain {recipe} --html {long} | --html
2 | explain {recipe} --json --html {out} | not allowed
2 | explain {recipe} run.stps=1 | did you mean run.steps
2 | explain {recipe} mesh.shape=dp:0 | mesh.shape
2 | explain {recipe} model.hidden_size=0 | model.hidden_size
2 | explain {recipe} model.rope_theta=nan | model.rope_theta
2 | explain {recipe} model.axes.batch_axis=nope | nope
2 | plan | RECIPE
2 | plan {nothing} | no such file
2 | plan {recipe} --topology | --topology
2 | plan {recipe} --topology "" | topology
2 | plan {recipe} --topology nonsense | v5p:4x4x8
2 | plan {recipe} --topology nope:8 | unknown chip
2 | plan {recipe} --topology v5p:4x4 | 3 numbers
2 | plan {recipe} --topology v5p:0x4x4 | at least 1
2 | plan {recipe} --topology v5p:2x2x2*0 | at least 1
2 | plan {recipe} --topology cpu:99999999999 | devices
2 | plan {recipe} --topology cpu:3 | mesh.shape
2 | plan {recipe} --topology cpu:8 mesh.shape=dp:4 | mesh.shape
2 | plan {recipe} --topology cpu:8 --html | --html
2 | plan {recipe} --topology cpu:8 --html {nothing}/x.html | cannot be written
2 | plan {recipe} --topology cpu:8 --json --html {out} | not allowed
2 | plan {recipe} --topology cpu:8 run.stps=1 | did you mean run.steps
2 | plan {recipe} --topology cpu:8 run.hardware={nothing} | hardware
2 | plan {recipe} --topology cpu:8 model.hidden_size=0 | model.hidden_size
2 | plan {recipe} --topology cpu:8 data.batch_size=3 | data.batch_size
2 | plan {recipe} run.platform=npu | run.platform
2 | plan {recipe} --compile | requires --topology
2 | plan {recipe} --topology cpu:8 --limit 5 | requires --compile
2 | plan {recipe} --topology cpu:8 --compile --limit nan | positive number of seconds
2 | plan {recipe} --topology cpu:8 --compile --html {out} | --html is the page
2 | plan {recipe} --topology cpu:3 --compile | mesh.shape
2 | plan {recipe} --topology h200:1x8 --compile | H100
2 | plan --calibrate | --calibrate
2 | plan --calibrate {nothing}/x.toml | cannot be written
2 | plan --calibrate {out} run.platform=npu | run.platform
2 | plan {recipe} --calibrate {out} | no RECIPE
2 | mesh | SHAPE
2 | mesh nope --platform cpu:8 | nope
2 | mesh dp:0 --platform cpu:8 | dp
2 | mesh dp:x --platform cpu:8 | dp
2 | mesh dp:3 --platform cpu:8 | 8
2 | mesh dp:-1,tp:-1 --platform cpu:8 | -1
2 | mesh dp:2,dp:4 --platform cpu:8 | dp
2 | mesh "" --platform cpu:8 | axis
2 | mesh dp:99999999999999999999 --platform cpu:8 | dp
2 | mesh dp:8 --platform npu | npu
2 | mesh dp:8 --platform cpu:0 | cpu:0
2 | mesh dp:8 --platform cpu:x | cpu:x
2 | mesh dp:8 --platform "" | platform
2 | mesh dp:8 --platform cpu:8 --svg {nothing}/x.svg | cannot be written
2 | mesh dp:8 --platform cpu:8 --svg {no_files} | cannot be written
2 | mesh dp:8 --platform cpu:8 --svg {long} | --svg
2 | schedule | NAME
2 | schedule nope --stages 2 --microbatches 4 | nope
2 | schedule 1f1c --stages 2 --microbatches 4 | 1f1b
2 | schedule 1f1b | --stages
2 | schedule 1f1b --stages 2 | --microbatches
2 | schedule 1f1b --microbatches 2 | --stages
2 | schedule 1f1b --stages 0 --microbatches 4 | groups
2 | schedule 1f1b --stages -1 --microbatches 4 | groups
2 | schedule 1f1b --stages x --microbatches 4 | --stages
2 | schedule 1f1b --stages 2 --microbatches 0 | microbatches
2 | schedule 1f1b --stages 2 --microbatches -4 | microbatches
2 | schedule 1f1b --stages 2 --microbatches 1.5 | --microbatches
2 | schedule interleaved-1f1b --stages 4 --microbatches 6 | 6
2 | schedule interleaved-1f1b --stages 4 --microbatches 8 --virtual 0 | stages per group
2 | schedule 1f1b --stages 2 --microbatches 4 --virtual 3 | 1f1b
2 | schedule zb-v --stages 2 --microbatches 4 --virtual 3 | zb-v
2 | schedule 1f1b --stages 2 --microbatches 4 --costs x | costs
2 | schedule 1f1b --stages 2 --microbatches 4 --costs 1 | costs
2 | schedule 1f1b --stages 2 --microbatches 4 --costs 1,1 | costs
2 | schedule 1f1b --stages 2 --microbatches 4 --costs 1,1,1,1,1 | costs
2 | schedule 1f1b --stages 2 --microbatches 4 --costs 1,1,-1 | costs
2 | schedule 1f1b --stages 2 --microbatches 4 --costs 1,1,nan | costs
2 | schedule 1f1b --stages 2 --microbatches 4 --costs 1,1,inf | costs
2 | schedule 1f1b --stages 2 --microbatches 4 --costs 1e308,1e308,1e308 | costs
2 | schedule search --stages 2 --microbatches 4 --costs 1e308,1,1 | costs
2 | schedule 1f1b --stages 2 --microbatches 4 --costs 1,1,1/1,1,1/1,1,1 | costs
2 | schedule 1f1b --stages 2 --microbatches 4 --costs "" | costs
2 | schedule search --stages 2 --microbatches 4 --memory x | memory
2 | schedule search --stages 2 --microbatches 4 --memory 0 | memory
2 | schedule search --stages 2 --microbatches 4 --memory -1 | memory
2 | schedule search --stages 2 --microbatches 4 --memory 1,2,3 | memory
2 | schedule search --stages 2 --microbatches 4 --memory nan | memory
2 | schedule 1f1b --stages 4 --microbatches 8 --memory 1 | 1
2 | schedule search --stages 2 --microbatches 4 --seconds 0 | seconds
2 | schedule search --stages 2 --microbatches 4 --seconds -1 | seconds
2 | schedule search --stages 2 --microbatches 4 --seconds nan | seconds
2 | schedule search --stages 2 --microbatches 4 --seconds inf | seconds
2 | schedule search --stages 2 --microbatches 4 --seconds x | --seconds
2 | schedule search --stages 2 --microbatches 4 --seed x | --seed
2 | schedule 1f1b --stages 2 --microbatches 4 --seconds 1 | search
2 | schedule 1f1b --stages 2 --microbatches 4 --svg {nothing}/x.svg | cannot be written
2 | schedule 1f1b --stages 2 --microbatches 4 --svg {no_files} | cannot be written
2 | schedule 1f1b --stages 2 --microbatches 4 --svg {long} | --svg
2 | schedule 1f1b --stages 2 --microbatches 4 --bogus | --bogus
2 | schedule 1f1b --stages 2 --microbatches 4 more | more
2 | schedule 1f1b --measure {nothing} | no such file
2 | schedule 1f1b --measure {recipe} run.stps=1 | run.steps
2 | schedule 1f1b --measure {recipe} | pp
2 | checkpoint | WHAT
2 | checkpoint nope | nope
2 | checkpoint list | DIR
2 | checkpoint list {nothing} | not a folder
2 | checkpoint list {no_files} | no checkpoint
2 | checkpoint list {text} | not a folder
2 | checkpoint list {long} |
2 | checkpoint list {run} more | more
2 | checkpoint inspect {nothing} | not a folder
2 | checkpoint inspect {no_files} | no checkpoint
2 | checkpoint inspect {run} --step 7 | no step 7
2 | checkpoint inspect {run} --step -1 | no step -1
2 | checkpoint inspect {run} --step x | --step
2 | checkpoint inspect {run} --step 99999999999999999999999 | no step
3 | checkpoint inspect {truncated} | metadata
3 | checkpoint inspect {deep} | metadata
3 | checkpoint inspect {not_json} | metadata
2 | checkpoint verify {nothing} | not a folder
2 | checkpoint verify {run} --step 7 | no step 7
3 | checkpoint verify {damaged} |
3 | checkpoint verify {truncated} |
3 | checkpoint verify {no_metadata} |
3 | checkpoint list {damaged} |
2 | checkpoint diff {run} | B
2 | checkpoint diff {run} {nothing} | not a folder
2 | checkpoint diff {nothing} {run} | not a folder
2 | checkpoint diff {run} {recipe} --values | --values
2 | checkpoint diff {run} {recipe} run.stps=1 | run.steps
2 | checkpoint diff {run} {run} run.steps=1 | recipe
2 | checkpoint diff {run} {nothing}.py | no such file
3 | checkpoint diff {run} {truncated} |
2 | checkpoint export {run} {out} | --to
2 | checkpoint export {run} {out} --to nope | nope
2 | checkpoint export {run} {run} --to orbax | exists
2 | checkpoint export {run} {text} --to orbax | exists
2 | checkpoint export {run} {text}/x --to orbax | cannot be written
2 | checkpoint export {run} {long} --to orbax |
2 | checkpoint export {run} {out} --to orbax --step 7 | no step 7
2 | checkpoint export {run} {out} --to orbax --dtype int8 | int8
2 | checkpoint export {nothing} {out} --to orbax | not a folder
3 | checkpoint export {damaged} {out} --to orbax |
3 | checkpoint export {truncated} {out} --to safetensors |
2 | checkpoint import {nothing} {out} | config.json
2 | checkpoint import {no_files} {out} | config.json
2 | checkpoint import {text} {out} | config.json
3 | checkpoint import {hf_text} {out} | config.json
2 | checkpoint import {hf_list} {out} | config.json
3 | checkpoint import {hf_deep} {out} | config.json
2 | checkpoint import {hf_unknown} {out} | gpt_nope
2 | checkpoint import {hf_empty} {out} | safetensors
2 | checkpoint import {hf_types} {out} | hidden_size
2 | checkpoint import {hf_huge} {out} |
3 | checkpoint import {hf_header} {out} | safetensors
2 | checkpoint import {run} {out} | config.json
2 | checkpoint import {hf_types} {run} |
2 | checkpoint import {hf_types} {out} --ignore ( |
2 | checkpoint reshard {run} {out} | RECIPE
2 | checkpoint reshard {run} {run} {recipe} | exists
2 | checkpoint reshard {nothing} {out} {recipe} | not a folder
2 | checkpoint reshard {run} {out} {nothing} | no such file
2 | checkpoint reshard {run} {out} {recipe} mesh.shape=tp:3 | mesh.shape
2 | checkpoint reshard {run} {out} {recipe} model.mlp_size=8 | does not match
2 | checkpoint reshard {run} {out} {recipe} --step 7 | no step 7
2 | checkpoint reshard {run} {text}/x {recipe} | cannot be written
3 | checkpoint reshard {damaged} {out} {recipe} |
2 | train {recipe} run.folder={no_files} checkpoint.start_from={hf_text} | start_from
2 | train {recipe} run.folder={no_files} checkpoint.start_from={hf_header} | start_from
2 | train {recipe} run.folder={rows_folder} | metrics.jsonl
2 | train {recipe} run.folder={broken_link} | checkpoints
2 | train {recipe} run.folder={checkpoints_file} | checkpoints
3 | train {recipe} run.folder={truncated} | metadata
2 | train {recipe} run.folder={run} model.hidden_size=32 | does not match
2 | train {recipe} run.folder={run} optimizer.learning_rate=1 | optimizer.learning_rate
2 | train {recipe} model.vocab_size=16 | vocabulary
2 | train {recipe} run.best=1 checkpoint.keep_best=0 | run.best
2 | train {recipe} checkpoint.keep_best=1 checkpoint.best_metric=nope | best_metric
2 | train {recipe} checkpoint.keep_best=1 run.eval_every=0 | best_metric
"""


def commands() -> list[tuple[int, str, str]]:
    """(exit code, command, text of the error) of every invalid command."""
    found = []
    for line in COMMANDS.strip().splitlines():
        code, command, text = (part.strip() for part in line.split("|"))
        found.append((int(code), command, text))
    for key, values in SETTINGS.items():
        more = MORE.get(key, "")
        found += [(2, f"train {{recipe}} {more} {shlex.quote(f'{key}={value}')}", key) for value in values]
    for name in RECIPES:
        for command in (
            "train {}",
            "explain {}",
            "plan {} --topology cpu:8",
            "checkpoint diff {{run}} {}",
            "schedule 1f1b --measure {}",
        ):
            found.append((2, command.format(f"{{{name}}}"), f"{name}.py"))
    for name in LOSSES:
        found += [(2, f"{command} {{{name}}}", "loss") for command in ("train", "plan")]
    for name in BATCHES:
        found += [(2, f"{command} {{{name}}}", "") for command in ("train", "plan")]
    found += [(2, f"train {{{name}}}", "eval_fns['own']") for name in EVALS]
    for name in MODELS:
        found += [(2, f"{command} {{{name}}}", "") for command in ("train", "explain", "plan")]
    return found


def write_recipe(root: Path) -> Path:
    """Write a valid recipe and its tokens."""
    np.save(root / "tokens.npy", np.arange(16384, dtype=np.int32) % 32)
    path = root / "recipe.py"
    path.write_text(RECIPE.format(tokens=str(root / "tokens.npy")))
    return path


def write_files(root: Path, run: Path) -> None:
    """Write the files that the commands name. `run` is a run folder in `root`, whose copies are damaged."""

    def write(name: str, content: str | bytes) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    deep = "[" * 100_000 + "]" * 100_000
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "intermediate_size": 32, "rms_norm_eps": 1e-5}
    for name, text in {
        "hf_text": "not json",
        "hf_list": "[1, 2]",
        "hf_deep": deep,
        "hf_unknown": json.dumps({**config, "model_type": "gpt_nope"}),
        "hf_empty": json.dumps(config),
        "hf_types": json.dumps({**config, "hidden_size": "many"}),
        "hf_huge": json.dumps({**config, "num_hidden_layers": 10**30}),
        "hf_header": json.dumps(config),
    }.items():
        write(f"{name}/config.json", text)
    write("hf_header/model.safetensors", b"\xff" * 8 + b"{}")
    (root / "no_files").mkdir()
    (root / "rows_folder" / "metrics.jsonl").mkdir(parents=True)
    (root / "broken_link").mkdir()
    os.symlink(root / "nothing", root / "broken_link" / "checkpoints")
    write("checkpoints_file/checkpoints", "")
    for name, values in {"matrix": np.zeros((4, 4), np.int32), "floats": np.zeros(4)}.items():
        np.save(root / f"{name}.npy", values)
    write("text", "some text\n" * 10)
    write("binary", b"\xff\xfe\x00")
    write("odd.bin", b"\0" * 4097)
    for name, text in RECIPES.items():
        write(f"{name}.py", text)
    templates = ((LOSS_RECIPE, LOSSES), (MODEL_RECIPE, MODELS), (BATCH_RECIPE, BATCHES), (EVAL_RECIPE, EVALS))
    for template, bodies in templates:
        for name, body in bodies.items():
            write(f"{name}.py", template.format(body=body, recipe=str(root / "recipe.py")))
    metadata = {"truncated": b'{"config": {', "deep": deep.encode(), "not_json": b"\xff\0", "a_list": b"[1]"}
    for name in ("damaged", "no_metadata", *metadata):
        shutil.copytree(run, root / name)
        for step in (root / name / "checkpoints").iterdir():
            if name == "damaged":
                _flip_a_bit(max(step.rglob("*"), key=lambda path: path.stat().st_size * path.is_file()))
            elif name == "no_metadata":
                (step / "metadata" / "metadata").unlink()
            else:
                (step / "metadata" / "metadata").write_bytes(metadata[name])


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
