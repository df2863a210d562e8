"""Models of transformers and adapters of peft with unusual state."""

import contextlib
import sys

import torch
import transformers
from corpus.hostile.kit import G, case, cases, rec
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
HERE = sys.modules[__name__]
SCALE = 1.0


def ids(i, b=2, t=6, v=48):
    return torch.randint(0, v, (b, t), generator=torch.Generator().manual_seed(i))


def llama(attn="eager", **k):
    torch.manual_seed(1)
    c = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        use_cache=False,
        attn_implementation=attn,
        **k,
    )
    return LlamaForCausalLM(c).train()


def lm(
    m,
    change=None,
    steps=7,
    length=lambda i: 6,
    wrap=None,
    opt=True,
    mask=False,
    back=None,
    eval_at=(),
    **kw,
):
    g = G(m)
    o = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    for i in range(steps):
        if change:
            change(m, i, g)
        x = ids(i, 2, length(i))
        if i in eval_at:
            with torch.no_grad():
                m.eval()
                rec(
                    g(
                        input_ids=x,
                        attention_mask=torch.ones(6, 6, dtype=torch.bool)
                        .tril()[None, None]
                        .expand(2, 1, -1, -1)
                        .contiguous(),
                        **kw,
                    ).logits
                )
                m.train()
        extra = dict(kw)
        if mask == "none":
            pass
        elif not mask:
            extra["attention_mask"] = (
                torch.ones(length(i), length(i), dtype=torch.bool)
                .tril()[None, None]
                .expand(2, 1, -1, -1)
                .contiguous()
            )
        else:
            extra["attention_mask"] = torch.ones(2, length(i), dtype=torch.long)
        with wrap(i) if wrap else contextlib.nullcontext():
            out = g(input_ids=x, labels=x, **extra)
        rec(f"step {i}", out.loss, out.logits)
        out.loss.backward()
        ps = list(m.parameters())
        rec([p.grad for p in ps])
        o = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        o.step()
        o.zero_grad()
    rec(list(m.parameters()))


cases(
    llama_plain=lambda: lm(llama()),
    llama_dynamic_rope=lambda: lm(
        llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        length=lambda i: 6 if i < 5 else 40,
    ),
    llama_longrope=lambda: lm(
        llama(
            rope_parameters={
                "rope_type": "longrope",
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [2.0, 2.0, 2.0, 2.0],
                "original_max_position_embeddings": 16,
                "factor": 2.0,
                "rope_theta": 10000.0,
            }
        ),
        length=lambda i: 6 if i % 2 else 20,
    ),
    llama_attention_switched_after_capture=lambda: lm(
        llama("sdpa"), lambda m, i, g: m.set_attn_implementation("eager" if i in (4, 5) else "sdpa")
    ),
)


@case
def attention_interface_registered_reads_global():
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def mine(*a, **k):
        o, w = sdpa_attention_forward(*a, **k)
        return o * SCALE, w

    AttentionInterface.register("mine", mine)

    def ch(m, i, g):
        if i == 5:
            HERE.SCALE = 2.0

    lm(llama("mine"), ch)


@case
def gradient_checkpointing_enabled_later():
    def ch(m, i, g):
        if i == 4:
            m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if i == 7:
            m.gradient_checkpointing_disable()

    lm(llama(), ch, steps=10)


@case
def tied_weights_broken_after_capture():
    def ch(m, i, g):
        if i == 5:
            m.lm_head.weight = nn.Parameter(m.lm_head.weight.detach().clone() * 1.5)

    lm(llama(tie_word_embeddings=True), ch)


cases(
    evaluation_in_between=lambda: lm(llama("sdpa"), eval_at=(3, 5, 6)),
    hidden_states_and_attentions_returned=lambda: lm(
        llama(), output_hidden_states=True, output_attentions=True
    ),
    rotary_inverse_frequencies_replaced=lambda: lm(
        llama(), lambda m, i, g: m.model.rotary_emb.inv_freq.mul_(0.5) if i == 5 else None
    ),
)


def peft_model(kind="lora", **k):
    import peft

    m = llama("sdpa")
    if kind == "prompt":
        cfg = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    elif kind == "ia3":
        cfg = peft.IA3Config(
            target_modules=["q_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            task_type="CAUSAL_LM",
        )
    elif kind == "prefix":
        cfg = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    else:
        cfg = peft.LoraConfig(
            r=2,
            target_modules=["q_proj", "v_proj"],
            lora_dropout=k.pop("drop", 0.0),
            task_type="CAUSAL_LM",
            init_lora_weights=False,
            **k,
        )
    torch.manual_seed(2)
    return peft.get_peft_model(m, cfg).train()


cases(
    lora_plain=lambda: lm(peft_model()),
)


cases(
    dora=lambda: lm(peft_model(use_dora=True)),
    prompt_tuning=lambda: lm(peft_model("prompt"), mask=True),
)


cases(
    call_hf_module_with_position_ids=lambda: lm(
        llama("sdpa"), position_ids=torch.arange(6)[None].expand(2, 6)
    ),
)
