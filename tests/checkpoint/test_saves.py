"""Which of two saves is the newer one."""

from dlrover.checkpoint.machine.saves import Newest, Numbering, SaveId, StepOrder


def test_the_last_save_of_a_step_is_the_newest():
    numbers = Numbering(9, Newest(0, 4))
    first, second = numbers.next(7), numbers.next(7)
    assert (first, second) == (SaveId(0, 5, 7, 9), SaveId(0, 6, 7, 9))
    assert second > first
    assert second.folder == "0000000000000009-6"


def test_what_is_saved_after_going_back_is_newer_than_everything_before():
    numbers = Numbering(9, Newest(0, 0))
    abandoned = numbers.next(30)
    line = numbers.go_back()
    assert numbers.next(11) > SaveId(line, 1, 10, 9) > abandoned


def test_a_session_begins_above_all_that_is_known():
    numbers = Numbering(9, Newest().including(SaveId(3, 8, 40, 1), Newest(5, 6)))
    assert numbers.next(1) == SaveId(5, 9, 1, 9)
    numbers.pass_over(SaveId(5, 20, 1, 1))
    assert numbers.next(2).number == 21


def test_a_step_without_a_readable_save_is_where_its_number_puts_it():
    saves = {
        5: SaveId(7, 5, 5, 1),
        30: SaveId(0, 6, 30, 1),
        12: SaveId(7, 9, 12, 1),
        9: None,
        40: None,
    }
    order = StepOrder(save for save in saves.values() if save is not None)
    newest_first = sorted(saves, key=lambda step: order.key(step, saves[step]), reverse=True)
    assert newest_first == [40, 12, 9, 5, 30]
