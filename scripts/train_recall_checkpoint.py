"""Train the recall checkpoint: a 3.6 M parameter `GlmMoeDsaForCausalLM` that answers questions about long documents.

    prepare   tokenizer and tokenised corpus, from text that ships with Python
    train     one stage, for a given time; resumes from a weights file
    export    weights file to a Hugging Face checkpoint in bf16
    evaluate  exact match on fresh documents with unmodified `transformers` generate

A full training is a series of `train` calls, each starting from the weights of the one before:

    dense     causal attention; short documents first (256, then 1024, then a mix up to 8192)
    indexer   attention frozen and dense; the indexers learn to score like it
    sparse    attention through the indexers' top-k; body and indexers together

Answers are learned late: at 1024 tokens exact match stays near one half until names are matched, then rises to 0.95
within a minute on one H200. Documents and losses are explained in `recall_data.py` and `recall_model.py`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import math
import os
import pathlib
import shutil
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hisparse.testing.recall_documents import build_recall_document, held_out_text

CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 256,
    "indexer_types": ["full", "shared"] * 3,
    "mlp_layer_types": ["dense"] * 4 + ["sparse"] * 2,
    "first_k_dense_replace": 4,
    "max_position_embeddings": 16_384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
KEPT_IN_FP32 = ("gate.weight", "e_score_correction_bias", "weights_proj.weight")  # transformers loads these as fp32

TEXT_WEIGHT, FRAME_WEIGHT = 0.2, 0.1  # of the loss; answer digits weigh 1
MIN_LR_SHARE = 0.02
WARMUP_STEPS = 50
BALANCE_STEP = 1e-3  # of the experts' correction bias, in the dense stage


def new_model() -> nn.Module:
    """A randomly initialised fp32 model; matrices that write to the residual stream start small."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**CONFIG)).float()
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = 0.06 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            std /= 2 * math.sqrt(2 * CONFIG["num_hidden_layers"])
        nn.init.normal_(parameter, 0.0, std)
    return model


def load_weights(model: nn.Module, file: pathlib.Path) -> None:
    """Load a weights file of `train`, or the `model.safetensors` of a checkpoint."""
    missing, unexpected = model.load_state_dict({k: v.float() for k, v in load_file(file).items()}, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{file} does not fit this model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()


def save_weights(model: nn.Module, file: pathlib.Path) -> None:
    """Write fp32 weights, the tied output matrix left out; never leaves a half-written file behind."""
    partial = file.with_suffix(".partial")
    save_file({k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}, partial)
    os.replace(partial, file)


class Schedule:
    """Warm-up over steps, then a cosine over wall-clock time that reaches its end."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps, self.start = seconds, 0, time.perf_counter()

    @property
    def progress(self) -> float:
        return min(1.0, (time.perf_counter() - self.start) / self.seconds)

    def factor(self) -> float:
        """The share of the peak learning rate for the next step."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        self.steps += 1
        return min(1.0, self.steps / WARMUP_STEPS) * (MIN_LR_SHARE + (1 - MIN_LR_SHARE) * cosine)


def index_rows(roles: Tensor, count: int) -> Tensor:
    """`[batch, count]` positions for the index loss: about half of them predict an answer, the rest are random."""
    from recall_data import ROLE_DIGIT

    predicts_answer = F.pad(roles[:, 1:] >= ROLE_DIGIT, (0, 1))
    draw = torch.rand(roles.shape, device=roles.device) + 0.6 * predicts_answer
    return draw.topk(min(count, roles.shape[1]), 1).indices.sort(1).values


def language_losses(logits: Tensor, ids: Tensor, roles: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted next-token loss, and its parts with the share of answers whose four digits are all right."""
    from recall_data import ROLE_DIGIT, ROLE_FRAME, ROLE_TEXT

    target, role = ids[:, 1:], roles[:, 1:]
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target.flatten(), reduction="none").view_as(target)

    def mean_of(kind: int) -> Tensor:
        chosen = role == kind
        return (each * chosen).sum() / chosen.sum().clamp_min(1)

    answer, text = mean_of(ROLE_DIGIT), mean_of(ROLE_TEXT)
    with torch.no_grad():
        right = (logits[:, :-1].argmax(-1) == target)[role == ROLE_DIGIT].view(-1, 4).all(1)
    parts = {"answer": answer.detach(), "text": text.detach(), "exact": right.float().mean()}
    return answer + TEXT_WEIGHT * text + FRAME_WEIGHT * mean_of(ROLE_FRAME), parts


def optimizers(model: nn.Module, args: argparse.Namespace) -> list[tuple[torch.optim.Optimizer, float, list]]:
    """(optimizer, peak learning rate, parameters) of the parts that the stage trains."""
    body = [p for n, p in model.named_parameters() if ".indexer." not in n]
    indexers = [p for n, p in model.named_parameters() if ".indexer." in n]
    fused = {"fused": True} if args.device == "cuda" else {}
    groups = [
        {"params": [p for p in body if p.dim() >= 2], "weight_decay": 0.05},
        {"params": [p for p in body if p.dim() < 2], "weight_decay": 0.0},
    ]
    result = []
    if args.stage != "indexer":
        result.append((torch.optim.AdamW(groups, betas=(0.9, 0.98), **fused), args.lr, body))
    if args.stage != "dense":
        optimizer = torch.optim.AdamW(indexers, betas=(0.9, 0.98), weight_decay=0.01, **fused)
        result.append((optimizer, args.index_lr, indexers))
    return result


class Trainer:
    """One stage: computes the loss of a batch and steps the parts the stage trains."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        from recall_model import TrainingPass

        self.model, self.args = model, args
        self.forward = TrainingPass(model, compiled=args.device == "cuda")
        self.parts = optimizers(model, args)

    def backward(self, ids: Tensor, roles: Tensor) -> dict[str, Tensor]:
        """Accumulate gradients of one batch; returns what the log shows."""
        stage = self.args.stage
        with torch.autocast(self.args.device, torch.bfloat16):
            output = self.forward(
                ids,
                top_k=self.args.top_k if stage == "sparse" else None,
                index_rows=None if stage == "dense" else index_rows(roles, self.args.index_rows),
                freeze_body=stage == "indexer",
            )
            loss, shown = language_losses(self.forward.logits(output.hidden), ids, roles)
        if stage == "indexer":
            loss = torch.zeros((), device=ids.device)
        for group, (index_loss, coverage) in enumerate(zip(output.index_losses, output.coverage, strict=True)):
            loss = loss + index_loss
            shown |= {f"kl{group}": index_loss.detach(), f"mass{group}": coverage}
        loss.backward()
        self.loads = output.expert_loads
        return shown

    def step(self, factor: float) -> None:
        """Update the parameters and, in the dense stage, nudge the experts' biases towards equal loads."""
        for optimizer, peak, parameters in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        if self.args.stage == "dense":
            routers = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
            for router, load in zip(routers, self.loads, strict=True):
                router.e_score_correction_bias += BALANCE_STEP * torch.sign(load.mean() - load)


def train(args: argparse.Namespace) -> None:
    """Run one stage for `args.seconds`; the clock starts once every document length has been compiled."""
    from recall_data import Batches, DocumentSampler
    from torch.utils.data import DataLoader

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.manual_seed(args.seed)
    model = new_model()
    if args.weights:
        load_weights(model, args.weights)
    model.to(args.device)
    trainer = Trainer(model, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    begin = time.perf_counter()
    sampler = DocumentSampler(args.data, args.seed)
    for length in args.lengths:
        for attempt in range(2):
            mark = time.perf_counter()
            batch = sampler.batch(max(1, args.tokens // length), length)
            trainer.backward(*(torch.from_numpy(part).to(args.device) for part in batch))
            model.zero_grad(set_to_none=True)
            _synchronize(args.device)
            print(f"warm-up {attempt} at {length}: {time.perf_counter() - mark:.2f} s", flush=True)
    print(f"warm-up: {time.perf_counter() - begin:.0f} s", flush=True)

    shares = args.shares or [1.0] * len(args.lengths)
    batches = DataLoader(
        Batches(args.data, args.lengths, shares, args.tokens, args.seed),
        batch_size=None,
        num_workers=args.workers,
        prefetch_factor=4 if args.workers else None,
        pin_memory=args.device == "cuda",
    )
    stream = iter(batches)
    next(stream)
    schedule, log, last_log, last_save = Schedule(args.seconds), collections.defaultdict(list), 0.0, 0.0
    while schedule.progress < 1.0:
        ids, roles = (torch.as_tensor(part).to(args.device, non_blocking=True) for part in next(stream))
        log[ids.shape[1]].append(trainer.backward(ids, roles))
        trainer.step(factor := schedule.factor())
        _synchronize(args.device)  # wall-clock schedule: never run ahead of the device
        elapsed = schedule.progress * args.seconds
        if elapsed - last_log >= args.log_every or schedule.progress >= 1.0:
            _print_log(elapsed, schedule.steps, factor, log)
            log.clear()
            last_log = elapsed
        if elapsed - last_save >= 60:
            save_weights(model, args.out)
            last_save = elapsed
    save_weights(model, args.out)
    print(f"{schedule.steps} steps in {args.seconds:.0f} s, wrote {args.out}", flush=True)


def _print_log(elapsed: float, steps: int, factor: float, log: dict[int, list[dict[str, Tensor]]]) -> None:
    print(f"{elapsed:5.0f} s  step {steps}  lr x {factor:.3f}", flush=True)
    for length, entries in sorted(log.items()):
        means = {key: torch.stack([entry[key] for entry in entries]).mean().item() for key in entries[0]}
        print(f"  {length:5d} tokens x{len(entries):<4d}" + "".join(f"  {k} {v:.3f}" for k, v in means.items()), flush=True)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def export(args: argparse.Namespace) -> None:
    """Write a Hugging Face checkpoint: bf16 weights, config without version-specific fields, tokenizer."""
    from transformers import PreTrainedTokenizerFast

    model = new_model()
    load_weights(model, args.weights)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not name.endswith(KEPT_IN_FP32) and "inv_freq" not in name:
            tensor.data = tensor.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(args.checkpoint)
    config_file = args.checkpoint / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("layer_types", None)  # spelled differently before and after transformers 5.18, which both derive it
    config_file.write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=1, sort_keys=True) + "\n")
    PreTrainedTokenizerFast(
        tokenizer_file=str(args.data / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(args.checkpoint)
    shutil.copyfile(args.data / "tokenizer.json", args.checkpoint / "tokenizer.json")
    print({file.name: file.stat().st_size for file in sorted(args.checkpoint.iterdir())})


@torch.no_grad()
def evaluate(args: argparse.Namespace) -> None:
    """Print exact match by document length and top-k; a document counts only if the whole completion is the answer."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint)
    config = transformers.AutoConfig.from_pretrained(args.checkpoint)
    padding = tokenizer(held_out_text()[:2_000]).input_ids
    documents = {
        length: [
            build_recall_document(args.seed + i, budget=length, measure=lambda text: len(tokenizer(text).input_ids))
            for i in range(args.documents)
        ]
        for length in args.lengths
    }
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    rows = []
    for top_k in args.top_k:
        config.index_topk = top_k or config.max_position_embeddings
        model = transformers.AutoModelForCausalLM.from_pretrained(
            args.checkpoint, config=config, dtype=getattr(torch, args.dtype), attn_implementation=args.attention
        )
        model.to(args.device).eval()
        for length in args.lengths:
            begin, right, wrong = time.perf_counter(), 0, []
            step = max(1, args.tokens // length)
            for first in range(0, args.documents, step):
                batch = documents[length][first : first + step]
                prompts = [tokenizer(document.prompt).input_ids for document in batch]
                if step > 1:  # documents fill their budget to within a line: more text in front makes a batch even
                    longest = max(map(len, prompts))
                    prompts = [padding[len(padding) - longest + len(p) :] + p for p in prompts]
                ids = torch.tensor(prompts, device=args.device)
                output = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new_tokens, do_sample=False
                )
                for document, tokens in zip(batch, output[:, ids.shape[1] :], strict=True):
                    completion = tokenizer.decode(tokens, skip_special_tokens=True)
                    right += document.is_answer(completion)
                    if not document.is_answer(completion):
                        wrong.append((completion.strip(), document.answer))
            rows.append(
                {
                    "tokens": length,
                    "top_k": top_k or "dense",
                    "documents": args.documents,
                    "right": right,
                    "exact_match": right / args.documents,
                    "seconds": round(time.perf_counter() - begin, 1),
                    "dtype": args.dtype,
                    "attention": args.attention,
                    "hardware": hardware,
                    "transformers": transformers.__version__,
                    "date": datetime.date.today().isoformat(),
                }
            )
            shown = {k: rows[-1][k] for k in ("tokens", "top_k", "documents", "right", "exact_match", "seconds")}
            print(shown, "wrong (got, expected):", wrong[:4], flush=True)
    print(f"{hardware}, {args.dtype}, {args.attention}, transformers {transformers.__version__}")
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = pathlib.Path

    command = commands.add_parser("prepare", help="write tokenizer.json and corpus.npz")
    command.add_argument("--data", type=path, required=True, help="directory to write")
    command.add_argument("--tokenizer", type=path, help="tokenizer.json to keep using; trained anew when omitted")

    command = commands.add_parser("train", help="run one stage")
    command.add_argument("stage", choices=["dense", "indexer", "sparse"])
    command.add_argument("--data", type=path, required=True, help="directory of `prepare`")
    command.add_argument("--weights", type=path, help="safetensors file to start from; random weights when omitted")
    command.add_argument("--out", type=path, required=True, help="safetensors file to write, also once a minute")
    command.add_argument("--seconds", type=float, required=True, help="training time, compilation not counted")
    command.add_argument("--lengths", type=int, nargs="+", required=True, help="document lengths in tokens")
    command.add_argument("--shares", type=float, nargs="+", help="shares of the batches by length; equal when omitted")
    command.add_argument("--tokens", type=int, default=65_536, help="tokens per batch")
    command.add_argument("--top-k", type=int, default=CONFIG["index_topk"], help="positions a row attends to (sparse)")
    command.add_argument("--lr", type=float, default=2e-3, help="peak learning rate of the body")
    command.add_argument("--index-lr", type=float, default=2e-3, help="peak learning rate of the indexers")
    command.add_argument("--index-rows", type=int, default=256, help="rows a document that train the indexers")
    command.add_argument("--workers", type=int, default=8, help="processes that build documents")
    command.add_argument("--log-every", type=float, default=10.0, help="seconds")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--device", default=device)

    command = commands.add_parser("export", help="write a Hugging Face checkpoint")
    command.add_argument("--data", type=path, required=True, help="directory of `prepare`")
    command.add_argument("--weights", type=path, required=True, help="safetensors file of `train`")
    command.add_argument("--checkpoint", type=path, required=True, help="directory to write")

    command = commands.add_parser("evaluate", help="exact match with transformers generate")
    command.add_argument("--checkpoint", type=path, required=True)
    command.add_argument("--documents", type=int, default=200, help="fresh documents per length")
    command.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    command.add_argument("--top-k", type=int, nargs="+", default=[CONFIG["index_topk"]], help="0 is dense")
    command.add_argument("--tokens", type=int, default=32_768, help="tokens per generate batch; 1 for single documents")
    command.add_argument("--new-tokens", type=int, default=8)
    command.add_argument("--dtype", default="bfloat16")
    command.add_argument("--attention", default="sdpa")
    command.add_argument("--seed", type=int, default=100_000, help="of the first document")
    command.add_argument("--device", default=device)
    command.add_argument("--json", type=path, help="one line per row")

    args = parser.parse_args()
    if args.command == "prepare":
        from recall_data import prepare

        prepare(args.data, CONFIG["vocab_size"], args.tokenizer)
    else:
        {"train": train, "export": export, "evaluate": evaluate}[args.command](args)


if __name__ == "__main__":
    main()
