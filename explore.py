import sys
from pathlib import Path
sys.path.insert(0, ".")
from bench.family import COMMON, Job, captions, run
out = Path("/tmp/explore")
common = (*COMMON, f"eval.prompts={captions(out)}", "eval.num_prompts=1024", "sample.batch_size=1024", "train.batch_size=1024", "sample.decode_batch_size=512")
P16 = "sample.num_prompts=16"
f = "tree_fast kernel.eta=0.85"
long = (
    f"tree_long kernel.eta=0.85", f"tree_long kernel.eta=0.85 train.updates=4", f"tree_long kernel.eta=0.85 train.learning_rate=1e-4 train.updates=8",
    "tree_long kernel.eta=0.85 sample.tail_solver=dpmpp_2m sample.tail_steps=5", "tree_long kernel.eta=0.85 sample.num_prompts=32", "tree_long kernel.eta=0.7",
)
c50 = (
    f, f"{f} train.updates=4", f"{f} tree.w=4 {P16}", f"{f} tree.w=4 {P16} train.updates=4", f"{f} tree.w=4", f"{f} tree.w=4 {P16} sample.tail_steps=4",
    f"{f} sample.tail_steps=4", f"{f} tree.w=4 {P16} train.learning_rate=4e-4", f"{f} train.schedule=cosine", f"{f} tree.w=2 tree.k=3", f"{f} {P16}",
    f"{f} tree.w=5 sample.num_prompts=8", "tree_fast kernel.eta=0.7", f"{f} train.beta2=0.99", f"{f} tree.siblings=independent",
    f"{f} train.updates=16", f"{f} tree.w=4 {P16} train.updates=16"
)
c75 = (f, f"{f} tree.w=4 {P16}", f"{f} tree.w=4 {P16} sample.tail_steps=4", f"{f} sample.tail_steps=4", f"{f} tree.w=4 {P16} train.updates=4",f"{f} tree.w=4 {P16} sample.tail_steps=0")
jobs = [Job("x", 400000., (100,), long, common), Job("x", 75000., (100, 101), c75, common), Job("x", 50000., (100, 101), c50, common), Job("x", 30000., (100, 101), c50[:8], common)]
if __name__ == "__main__":
    run(jobs, Path(sys.argv[1]), out, int(sys.argv[2]), float(sys.argv[3]))
