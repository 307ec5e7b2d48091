"""A linear probe: multinomial logistic regression on vectors. topic_probe.py and the tests import
it.
"""

import numpy as np
from scipy import optimize, special

PENALTY = 1e-3  # times half the squared norm of the weights, added to the mean loss


def predict(train_NxD: np.ndarray, labels_N: np.ndarray, test_MxD: np.ndarray) -> np.ndarray:
    """Returns the labels of the test vectors by a probe that is fitted to the others. Labels are 0,
    1, …
    """
    mean, scale = train_NxD.mean(axis=0), train_NxD.std(axis=0)
    train_NxD, test_MxD = (
        (x - mean) / np.where(scale > 0, scale, 1) for x in (train_NxD, test_MxD)
    )
    width, classes = train_NxD.shape[1], labels_N.max() + 1
    is_label_NxC = np.eye(classes)[labels_N]

    def loss_and_gradient(weights):
        kernel_DxC, bias_C = weights[:-classes].reshape(width, classes), weights[-classes:]
        log_p_NxC = special.log_softmax(train_NxD @ kernel_DxC + bias_C, axis=1)
        error_NxC = (np.exp(log_p_NxC) - is_label_NxC) / len(labels_N)
        return (
            -np.sum(log_p_NxC * is_label_NxC) / len(labels_N) + PENALTY / 2 * np.sum(kernel_DxC**2),
            np.concatenate(
                [(train_NxD.T @ error_NxC + PENALTY * kernel_DxC).ravel(), error_NxC.sum(axis=0)]
            ),
        )

    found = optimize.minimize(
        loss_and_gradient,
        np.zeros((width + 1) * classes),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 500},
    )
    return (test_MxD @ found.x[:-classes].reshape(width, classes) + found.x[-classes:]).argmax(
        axis=1
    )
