"""How many drafts the target accepts, and what it says next: tensors in, (accepted, tokens) out.

In ``tokens`` ``[B, K+1]`` the first ``accepted[b]`` are the accepted drafts and the next one is the bonus token,
the target's own; what lies behind it means nothing. A missing draft (``NO_DRAFT``) is never accepted, and the bonus
token is chosen as if the drafts had ended before it.
"""

import torch
from torch import Tensor

from specgen.decoding.outcome import NO_DRAFT
from specgen.decoding.sampling import draw


def accept_greedy(drafts: Tensor, greedy_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts ``[B, K]`` are accepted as long as they are the target's own choice, ``greedy_tokens`` ``[B, K+1]``.

    Returns accepted ``[B]`` and tokens ``[B, K+1]``, the plain greedy continuation.
    """
    accepted = (drafts == greedy_tokens[:, :-1]).long().cumprod(1).sum(1)
    return accepted, greedy_tokens


def accept_by_dice(
    drafts: Tensor, greedy_tokens: Tensor, chances: Tensor, dice: Tensor
) -> tuple[Tensor, Tensor]:
    """As ``accept_greedy`` in what it returns, but what is accepted has nothing to do with the target.

    A draft is accepted behind accepted ones where its die, uniform in [0, 1), is below its chance; ``dice`` ``[B, K]``,
    ``chances`` ``[K]``.
    """
    accepted = ((drafts != NO_DRAFT) & (dice < chances)).long().cumprod(1).sum(1)
    k = drafts.shape[1]
    taken = torch.arange(k, device=drafts.device) < accepted[:, None]
    tokens = torch.cat((torch.where(taken, drafts, greedy_tokens[:, :k]), greedy_tokens[:, k:]), 1)
    return accepted, tokens


def accept_sampled(
    drafts: Tensor, draft_probs: Tensor | None, probs: Tensor, u_accept: Tensor, u_emit: Tensor
) -> tuple[Tensor, Tensor]:
    """Exact rejection sampling (Leviathan et al., 2023; Chen et al., 2023): tokens are distributed as ``probs``.

    drafts ``[B, K]``; draft_probs ``[B, K, V]`` that they were drawn from, zeros of a missing one, or None where each
    was chosen outright (a one-hot distribution) or is missing; probs ``[B, K+1, V]`` of the target; u_accept ``[B, K]``
    and u_emit ``[B, K+1]`` uniform in [0, 1). Draft i is accepted with probability min(1, p/q); at the first rejection
    the bonus token is drawn from max(0, p - q), after the last draft from p. Returns accepted ``[B]`` and tokens
    ``[B, K+1]``.
    """
    proposed, drafts = drafts != NO_DRAFT, drafts.clamp(min=0)
    chosen = drafts[..., None]
    q = torch.zeros_like(probs)  # behind the last draft its rows stay zero: there nothing is taken from p
    if draft_probs is None:
        q[:, :-1].scatter_(-1, chosen, proposed[..., None].to(q.dtype))
    else:
        q[:, :-1] = draft_probs
    p_draft, q_draft = (x[:, :-1].gather(-1, chosen).squeeze(-1) for x in (probs, q))
    accepted = (proposed & (u_accept * q_draft < p_draft)).long().cumprod(1).sum(1)

    here = accepted[:, None, None].expand(-1, 1, probs.shape[-1])
    p_here = probs.gather(1, here).squeeze(1)
    residual = (p_here - q.gather(1, here).squeeze(1)).clamp(min=0)
    # p equal to q up to rounding leaves nothing to draw from, and p is then the right distribution
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_here)
    bonus = draw(residual, u_emit.gather(1, accepted[:, None]).squeeze(1))
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], 1)
    return accepted, tokens.scatter(1, accepted[:, None], bonus[:, None])
