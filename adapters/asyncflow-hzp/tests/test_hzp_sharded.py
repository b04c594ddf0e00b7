"""A sharded model trains as one process does, at every tuple. `slow` covers all of them."""

import pytest
from library_models import Case, expected_run, loss_of, make_sharded, train, weights_of
from library_ranks import (
    DENSE,
    MOE,
    check_all,
    check_delays,
    check_error,
    check_meta,
    check_resume,
    check_resume_smaller,
    check_save,
    check_some,
    check_traffic,
    start,
)

from asyncflow_core.errors import ConfigError, ServiceError
from asyncflow_hzp.layout import Sizes

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("case", [*DENSE, MOE[0]], ids=str)
def test_one_rank_any_case_trains_as_plain(case):
    expected, _ = expected_run(1, case)
    model, optimizer = make_sharded(case, Sizes(1, 1, 1))
    train(model, optimizer, case, range(2))
    found = weights_of(model)
    model.close()
    for name, tensor in expected.items():
        worst = float((found[name] - tensor).abs().max())
        assert worst <= (0.0 if case == Case() else 2e-3 if case.low else 2e-6), name


def test_two_ranks_some_tuples_train_as_plain():
    chosen = [((2, 2, 2), case) for case in (*DENSE, MOE[1])]
    start(check_some, 2, [*chosen, ((1, 1, 2), DENSE[0]), ((1, 1, 1), DENSE[2])])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_all_tuples_dense_and_moe_train_as_plain(world):
    start(check_all, world, [*DENSE, *MOE])


def test_gather_or_reduce_fails_error_names_the_unit():
    start(check_error, 2)


@pytest.mark.slow
def test_random_delays_hundred_steps_end_with_equal_weights():
    start(check_delays, 4, 100)


def test_meta_device_model_gets_values_of_the_first_rank():
    start(check_meta, 2)


def test_resume_other_tuple_bit_equal(tmp_path):
    start(check_resume, 2, str(tmp_path / "a"), (2, 2, 2), (1, 1, 2))


@pytest.mark.slow
def test_resume_other_world_size_goes_on(tmp_path):
    start(check_save, 4, str(tmp_path / "a"), (2, 4, 4))
    start(check_resume_smaller, 2, str(tmp_path / "a"), (2, 2, 2), 4)


def test_traffic_at_two_ranks_is_ideal():
    start(check_traffic, 2, (2, 2, 2), 3, 2.0)


def test_second_last_backward_of_a_step_refused():
    case = Case()
    model, optimizer = make_sharded(case, Sizes(1, 1, 1))
    loss_of(model, 0, 0, 0).backward()
    with pytest.raises(ServiceError, match="no_sync"):
        loss_of(model, 0, 1, 0).backward()
    optimizer.zero_grad()
    train(model, optimizer, case, range(1))
    model.close()


def test_sizes_that_do_not_fit_refused():
    with pytest.raises(ConfigError, match="must divide"):
        make_sharded(Case(), (2, 2, 2))
    with pytest.raises(ConfigError, match="no sharding 'zero9'"):
        make_sharded(Case(), "zero9")
