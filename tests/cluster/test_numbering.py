import torch

from opencon.cluster.numbering import by_size, order_by_size


def test_groups_are_numbered_by_size_and_seen_classes_keep_theirs():
    #        seen 0, 1; group 2 has one row, 3 none, 4 three
    assert by_size(torch.tensor([1, 0, 4, 2, 4, 4]), 2).tolist() == [1, 0, 2, 3, 2, 2]


def test_without_a_row_of_a_seen_class_groups_still_come_after_it():
    assert by_size(torch.tensor([5, 3, 5]), 2).tolist() == [2, 3, 2]
    assert by_size(torch.tensor([0, 0]), 3).tolist() == [0, 0]


def test_the_order_names_every_class_and_equals_stay_as_they_are():
    #        seen 0, 1; groups 2 and 5 have two rows each, 4 three, 3 none
    classes = torch.tensor([5, 1, 4, 2, 4, 2, 5, 4])
    assert order_by_size(classes, 2, 7).tolist() == [0, 1, 4, 2, 5, 3, 6]
    assert order_by_size(torch.tensor([1, 1, 0]), 0, 2).tolist() == [1, 0]
