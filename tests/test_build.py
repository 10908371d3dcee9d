"""What a configuration becomes."""

from specgen.build import num_pages
from tests.engines import Pair, config_of


def test_only_a_run_that_drafts_keeps_kv_of_the_head(random_pair: Pair) -> None:
    # 6 layers of the target and 1 of the head, k and v, 2 KV heads of 16, 4 bytes, pages of 4 positions
    for k, page in ((0, 6 * 2 * 2 * 16 * 4 * 4), (3, 7 * 2 * 2 * 16 * 4 * 4)):
        ten, nine = (
            config_of(random_pair, num_spec_tokens=k, kv_memory=n) for n in (10 * page, 10 * page - 1)
        )
        assert num_pages(ten, random_pair.models) == 10
        assert num_pages(nine, random_pair.models) == 9


def test_no_more_pages_than_the_batch_can_need(random_pair: Pair) -> None:
    longest = random_pair.models.target.config.max_positions + 3 + 1
    config = config_of(random_pair, max_batch_size=2, kv_memory=1 << 30)
    assert num_pages(config, random_pair.models) == 2 * longest // config.page_size
