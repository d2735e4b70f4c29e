"""What users mistype, one command line each; every one of them ends with exit code 2."""

from __future__ import annotations

from pathlib import Path

# Files that the lines name, in the folder where they are typed.
FILES = {
    "tiny.yaml": "tp: 2\n",
    "notes.txt": "abc\n",
    "net.py": f"{(Path(__file__).parent / 'user_net.py').read_text()}\n\ndef number():\n    return 3\n",
}

# What is no command but advice for people.
PROSE = (
    "another port for one of them",
    "no global sizes in forward.*",
    r"heads by unflatten.*",
    "every module of forward",
    "in order",
    r"\$\{oc\.env:.*",
    "with a default value",
)

_WORDS = """
=2
tp =2 => no spaces around =
tp = 2 => no spaces around = | did you mean: tp=2
tp=
model
model= => a name is missing
plan verify
tp=2 plan => try: parallelrun plan tp=2
plan ls
model=gpt plan
gpt
quickstart => recipe=quickstart
gpt2_124m
ptdp tp=2
plna => did you mean: plan
verfy tp=2
tiny.yaml => needs recipe= | recipe=tiny.yaml
~model
~tp => cannot be removed
~nosuch
~model.kv_heads
~dataset.path=x
+tp
+model=gpt => without +
+nosuch=1 => no such key: nosuch
--tp 8 => without dashes | did you mean: tp=8
--tp
--model.layers 4
--num-layers 4
--jsn => did you mean: --json
--json=1
--multirn tp=1,2
--dry-run
-np
-np x => -np x
-np 5 -H localhost:4
-H h1:x
-m -H h1:2 tp=1,2
--cfg => a value must follow
--cfg nosuch
--config-name
tpp=8 => tpp=8: no such key: tpp | did you mean: tp
layer=4
model.hiden=32
lr=0.1
epochs=3
recipes=quickstart
stratgy=ddp
checkpoint=10
eval=3 => eval holds keys
model.router=switch
strategy.data=fsdp
optimizer.name=adam
optimizer=adam
optimizer.lr=x
optimizer.lr=null => did you mean: optimizer.lr=0.003
optimizer.lr=-1 => optimizer.lr
optimizer.lr=nan => optimizer.lr
optimizer.betas=0.9 => optimizer.betas
optimizer.betas=[0.9]
optimizer.betas=[a,b] => optimizer.betas
optimizer.lr_scale=fast
model=gtp => model=gtp: no such model | did you mean: model=gpt | try: parallelrun ls
model=null
model=gpt,mlp
model.layers={a:1}
model.layers=[1]
model.layers=1,2
model.layers=2.5
model.heads=3
model.kv_heads=3
model.hidden=30
model.vocab=10
model.name=gtp
model.roles=[1] => model.roles
model.roles=null => did you mean: model.roles={}
model=resnet model.stages=3
model.dataset=nosuch
model=module
model=module model.source=net.py
model=module model.source=./nosuch.py:build => there is no file
model=resnet model.stem=tiny
model=resnet tp=3
model=resnet layout=2d tp=4
model=resnet model.norm_samples=7
model=resnet dataset=text path=notes.txt
model=resnet model.image=1
model=alexnet model.image=4
model=bert model.norm=rmsnorm
strategy=pdtp => strategy=pdtp: no such strategy | strategy=ptdp
strategy=null => must be chosen
strategy=ddp tp=2 world=3
strategy=ddp staleness=2 => staleness=2
strategy=tp2d layout=1d
strategy=tp2d tp=5
strategy=tp2d tp=4 grid=3x2
strategy=tp2d tp=4 grid=two
strategy=tp25d tp=8 depth=3
strategy=tp3d tp=4
strategy=tp3d tp=8 depth=2
strategy=tp layout=4d
strategy=ps tp=2
strategy=ps dp=2 consistency=never
strategy=ps dp=2 consistency=sync staleness=2
strategy=ps dp=2 consistency=async backup_workers=1
strategy=ps dp=2 backup_workers=2
strategy=ps world=2 servers=2
strategy=ps dp=2 strategy.data.delays=[-1]
strategy=hsdp dp=4 strategy.data.shard=3
strategy=fsdp dp=2 strategy.data.kind=zero9
strategy=ring dp=4 strategy.data.algorithm=hierarchical strategy.data.group_size=3
strategy=ring dp=2 strategy.data.group_size=2
strategy=horovod dp=2 strategy.data.compression=zip
strategy=horovod dp=2 strategy.data.reduction=sum
strategy=horovod dp=3 strategy.data.reduction=adasum
strategy=horovod dp=2 strategy.data.powersgd_rank=2
strategy=horovod dp=2 strategy.data.worker_batches=[1,2]
strategy=horovod dp=4 strategy.data.process_sets=[[0,1],[1,2]]
strategy=diloco dp=2 strategy.data.outer_momentum=0
strategy=local_sgd dp=2 strategy.data.outer_lr=0.1
strategy=gpipe pp=5 model.layers=2
strategy=gpipe pp=2 microbatches=7
strategy=gpipe pp=2 micro_batch=5
strategy=gpipe pp=2 virtual_stages=2
strategy=1f1b pp=4 microbatches=2
strategy=1f1b pp=2 strategy.pipeline.partition=best
strategy=1f1b pp=2 strategy.pipeline.split=[layers.99]
strategy=1f1b pp=2 strategy.pipeline.split=[layers.1,layers.2]
strategy=1f1b pp=3 strategy.pipeline.split=[layers.4,layers.2]
strategy=1f1b pp=3 strategy.pipeline.partition=uniform
strategy=interleaved pp=2 virtual_stages=9
strategy=zero_bubble pp=2 schedule=zb
schedule=zbv pp=2 virtual_stages=3
schedule=naive pp=2 microbatches=4
layout=2d tp=5
tp=3
tp=0 => tp=0
tp=eight => not a whole number | did you mean: tp=1
tp=8 tp=4 => given twice: tp=8 and tp=4
tp=1,2 => several values need a sweep | try: parallelrun -m ... tp=1,2
tp=${nosuch} => 'nosuch' not found | where: tp
tp=choice(1,2) => multirun
tp=16
dp=7
pp=11
ep=2 => model=moe_gpt
depth=2
grid=2x2
world=3 tp=2
world=4 dp=3
world=2 dp=4
global_batch=7 dp=2
global_batch=99999999999 => did you mean: global_batch=1048576
global_batch=8 local_batch=4
micro_batch=7
micro_batch=2 microbatches=3
steps=0 => steps
steps=1.5 => did you mean: steps=1 or steps=2
seed=1e400 => did you mean: seed=1234
compile=2 => did you mean: compile=true or compile=false
model=resnet precision=fp8
optimizer.rounding=stochastic
tp=4 layout=2d precision=fp8 => layout=1d
name=../x => name
name=a/b
tracker=wandbb
tracker=wandb,mlflow
tracker=[mlflow,tensorbord]
tracker.projekt=x
tracker=null
plan detail=rank
plan detail=ranks,all,many
detail=ranks
plan detail=
plan plot=/nonexistent/x
plot=x
plan strategy=single plot=x
dataset=tekst => dataset=text
dataset.name=texts
path=notes.txt
path=a dataset.path=b => given twice
cluster=a100
cluster.ps=[localhost]
strategy=ddp cluster.ps=[localhost:2222] cluster.worker=[localhost:2223]
strategy=ps cluster.worker=[localhost:2223]
strategy=ps cluster.ps=[localhost:2222] cluster.worker=[localhost:2222]
strategy=ps cluster.ps=[localhost:99999] cluster.worker=[localhost:2222]
sweep.fail_fast=2
recipe=quikstart => recipe=quikstart: no such recipe | recipe=quickstart
recipe=nosuch.yaml
recipe=null,quickstart
recipe=quickstart,classics
verb=plan
ls modls => did you mean: ls models
show nosuch => recipe=nosuch
show a b => one recipe
show quickstart tpp=2
show quickstart tp=x
model=moe_gpt strategy=gshard dp=4 ep=3 => are not divisible by ep=3 | ep=2 or ep=4 | does not divide dp=4
model=moe_gpt dp=6 ep=4 => ep=2 or dp=4 or dp=8 | ep=4 does not divide dp=6, whose ranks hold the experts
model=moe_gpt strategy=dropless model.router.top_k=9 => model.router.top_k=8 | model.experts=9
model=moe_gpt strategy=gshard model.router.capacity_factor=0 => finite number above 0
model=moe_gpt strategy=gshard model.router.kind=best => top_k, gshard, switch, expert_choice
model=moe_gpt strategy=gshard model.router.top_k=3
model=moe_gpt strategy=dropless strategy.expert.kind=capacity => model.router.capacity_factor=1.25
model=moe_gpt strategy=ddp dp=2 strategy.expert.chunks=2 => ep is 1 | ep=2 or leave
model=moe_gpt strategy=gshard strategy.router.jitter=0.1 => did you mean: model.router.jitter
model=moe_gpt strategy=gshard dp=4 ep=4 strategy.expert.group_size=3
model=moe_gpt strategy=switch model.experts=0
model=moe_gpt strategy=dropless model.router.eval_capacity_factor=2
model=moe_gpt dp=4 ep=2 strategy=horovod strategy.data.process_sets=[[0,2]] => workers 0 to 1 | [[0,1,2,3]]
strategy=gshard => model=gpt has none | model=moe_gpt
strategy=tp tp=2 strategy.tensor.sequence_parallel=true model.seq=63
strategy=tp2d tp=4 strategy.tensor.sequence_parallel=true
strategy=tp2d tp=4 strategy.tensor.form=best
-m model=gtp,gpt => model=gtp
-m tp=1,two => two
hydra.nosuch=1
--config-dir /nonexistent => /nonexistent
-cn nosuch => nosuch
--resolve => --resolve
recipe=./none.yaml => no such file | none.yaml
tp=010 => parsed as 8 from 010; write 8 or 10
tp=${pp} pp=${tp} => refers to itself
name=${oc.env:NO_SUCH_VARIABLE_HERE} => NO_SUCH_VARIABLE_HERE
name=${nosuchresolver:1} => nosuchresolver
plan tp=3 => tp=2 or tp=4
path=a.txt => path
tp 8 => a value is missing | did you mean: tp=8
-np 4 world=8 => given twice
profile=true => profile takes a list: steps that | did you mean: profile=[]
profile=3,4 => did you mean: profile=[3,4]
model.arguments=3 => takes a mapping
strategy=tp2d tp=8 grid=[2,4] => takes one value, not a list | did you mean: grid=2x4
tp=[2,4] => did you mean: tp=2
device=[cpu] => did you mean: device=cpu
strategy.pipeline.partition=[uniform] => did you mean: strategy.pipeline.partition=uniform
strategy.pipeline.partition=[1,2] => did you mean: strategy.pipeline.partition=cost
strategy=../../x => choose a strategy by its name; ../../x points to
model=mine/small => no such model | where: model
seed=${oc.env:HOME} => could not be converted to Integer
lora.rank=8 => no such key
model.name_or_path=gpt2 => did you mean: model.from_hf=gpt2
latest => did you mean: resume=latest
model.router.topk=2 => did you mean: model.router.top_k=2
checkpoint.every=1.5 => did you mean: checkpoint.every=1 or checkpoint.every=2
model.layers=0.5 => did you mean: model.layers=1
strategy=gpipe pp=2 strategy.pipeline.split=[layer.1] => did you mean: strategy.pipeline.split=[layers.1]
full => did you mean: recompute=full
num_attention_heads=4 => did you mean: model.heads=4
recompte=some => did you mean: recompute=...
model=module model.source=nosuch.net:f => No module named 'nosuch'
"""

# What the message must have, after the arrow.
SAID = {command: texts.split(" | ") for command, _, texts in (line.partition(" => ") for line in _WORDS.splitlines())}
CATALOGUE = [command for command in SAID if command]

_MODULE = "model=module model.source=./net.py:build"
OWN_MODULES = [
    f"{_MODULE} tp=2",
    f"{_MODULE} pp=2",
    f"{_MODULE} layout=2d tp=4",
    f"{_MODULE} model.blocks=[embd,layers.*,head] pp=2",
    f"{_MODULE} model.blocks=[layers.*,embed,head] pp=2",
    f"{_MODULE} 'model.roles={{embed: column_parallel}}' tp=2",
    f"{_MODULE} 'model.roles={{embd: embedding}}' tp=2",
    f"{_MODULE} 'model.roles={{\"*.[qkv]\": column}}' tp=2",
    f"{_MODULE} 'model.roles={{\"*.[qkv]\": column_parallel}}' tp=2",
    "model=module model.source=./net.py:biuld",
    "model=module model.source=./net.py:number",
    "model=module model.source=./nett.py:build",
    "model=module model.source=net:build:x",
]
