"""How many drafts the target accepts, and what it says next: tensors in, (accepted, tokens) out.

In ``tokens`` ``[B, K+1]`` the first ``accepted[b]`` are the accepted drafts and the next one is the bonus token,
the target's own; what lies behind it means nothing. A missing draft (``NO_DRAFT``) is never accepted, and the bonus
token is chosen as if the drafts had ended before it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgen.decoding.outcome import NO_DRAFT
from specgen.decoding.sampling import draw


def accept_greedy(drafts: Tensor, greedy_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts ``[B, K]`` are accepted as long as they are the target's own choice, ``greedy_tokens`` ``[B, K+1]``.

    Returns accepted ``[B]`` and tokens ``[B, K+1]``, the plain greedy continuation.
    """
    accepted = (drafts == greedy_tokens[:, :-1]).long().cumprod(1).sum(1)
    return accepted, greedy_tokens


def accept_drawn(drafts: Tensor, probs: Tensor, u_emit: Tensor) -> tuple[Tensor, Tensor]:
    """As ``accept_greedy``, where plain decoding draws each token from ``probs`` ``[B, K+1, V]`` at ``u_emit``.

    For drafts that were chosen outright: each is accepted with its probability, as by rejection sampling, and the text
    is that of plain decoding with the same ``u_emit`` ``[B, K+1]``, uniform in [0, 1), whatever was drafted.
    """
    return accept_greedy(drafts, draw(probs, u_emit))


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
    drafts: Tensor, draft_probs: Tensor, probs: Tensor, u_accept: Tensor, u_emit: Tensor
) -> tuple[Tensor, Tensor]:
    """Exact rejection sampling (Leviathan et al., 2023; Chen et al., 2023): tokens are distributed as ``probs``.

    drafts ``[B, K]``; draft_probs ``[B, K, V]`` that they were drawn from, zeros of a missing one; probs
    ``[B, K+1, V]`` of the target; u_accept ``[B, K]`` and u_emit ``[B, K+1]`` uniform in [0, 1). Draft i is accepted
    with probability min(1, p/q); at the first rejection the bonus token is drawn from max(0, p - q), after the last
    draft from p. Returns accepted ``[B]`` and tokens ``[B, K+1]``.
    """
    proposed, drafts, q, p_draft, q_draft = _at_drafts(drafts, draft_probs, probs)
    accepted = (proposed & (u_accept * q_draft < p_draft)).long().cumprod(1).sum(1)
    p_here, q_here = (_behind(accepted, each) for each in (probs, q))
    return _with_bonus(accepted, drafts, (p_here - q_here).clamp(min=0), p_here, u_emit)


def accept_block(
    drafts: Tensor, draft_probs: Tensor, probs: Tensor, u_accept: Tensor, u_emit: Tensor
) -> tuple[Tensor, Tensor]:
    """As ``accept_sampled`` in what it takes and returns, and exact too, but drafts are judged together.

    Block verification (Sun et al., 2025, arXiv 2403.10444): on average it accepts as many drafts or more. The first i
    drafts have a share s_i = min(1, s_{i-1} p/q), s_0 = 1. With r_i the sum of max(0, s_i p - q) over the tokens behind
    them, they pass with probability r_i / (r_i + 1 - s_i), the last with s_i, as nothing was drafted behind it. The
    longest beginning that passes is accepted, and the bonus token drawn from max(0, s_i p - q).
    """
    proposed, drafts, q, p_draft, q_draft = _at_drafts(drafts, draft_probs, probs)
    ratios = torch.where(proposed, p_draft / q_draft, 0)
    shares = [torch.ones_like(u_emit[:, 0])]
    for ratio in ratios.unbind(1):
        shares.append((shares[-1] * ratio).clamp(max=1))
    share = torch.stack(shares, 1)
    residual = (probs * share[..., None]).sub_(q).clamp_(min=0)
    rest = residual.sum(-1)
    # 0 / 0, where p is q and so the next draft passes for certain, is no chance to end here
    passed = pad(u_accept, (1, 0)) < (rest / (rest + 1 - share)).nan_to_num(0)
    accepted = (passed * torch.arange(share.shape[1], device=drafts.device)).amax(1)
    return _with_bonus(accepted, drafts, _behind(accepted, residual), _behind(accepted, probs), u_emit)


def _at_drafts(
    drafts: Tensor, draft_probs: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Which drafts ``[B, K]`` there are, their ids, q ``[B, K+1, V]``, and p and q of the drafts ``[B, K]``.

    q is zero in the row of a missing draft and behind the last one: there nothing is taken from p.
    """
    proposed, drafts = drafts != NO_DRAFT, drafts.clamp(min=0)
    chosen = drafts[..., None]
    q = pad(draft_probs, (0, 0, 0, 1))
    p_draft, q_draft = (x[:, :-1].gather(-1, chosen).squeeze(-1) for x in (probs, q))
    return proposed, drafts, q, p_draft, q_draft


def _behind(accepted: Tensor, rows: Tensor) -> Tensor:
    """Of ``rows`` ``[B, K+1, V]`` those behind the accepted drafts ``[B]``."""
    return rows.gather(1, accepted[:, None, None].expand(-1, 1, rows.shape[-1])).squeeze(1)


def _with_bonus(
    accepted: Tensor, drafts: Tensor, residual: Tensor, p: Tensor, u_emit: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepted ``[B]`` and tokens ``[B, K+1]``, the one behind the accepted drafts drawn from ``residual`` ``[B, V]``.

    Where p equals q up to rounding it leaves nothing to draw from, and ``p`` ``[B, V]`` is then the right distribution.
    """
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    bonus = draw(weights, u_emit.gather(1, accepted[:, None]).squeeze(1))
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], 1)
    return accepted, tokens.scatter(1, accepted[:, None], bonus[:, None])
