// The paper's neuron view: eqs. 8, 11 and 12 for one scalar feature, a step at a time.
#include <cmath>

#include "onlinenorm.h"

onlinenorm_neuron onlinenorm_neuron_init(double alpha_fwd, double alpha_bwd, double eps) {
    onlinenorm_neuron neuron{};
    neuron.alpha_fwd = alpha_fwd;
    neuron.alpha_bwd = alpha_bwd;
    neuron.eps = eps;
    neuron.var = 1;
    neuron.sigma = 1;
    return neuron;
}

double onlinenorm_neuron_forward(onlinenorm_neuron* n, double x) {
    n->sigma = std::sqrt(n->var + n->eps);
    n->y = (x - n->mean) / n->sigma;  // eq. 8a
    const double alpha = n->alpha_fwd, d = x - n->mean;
    const double mean = alpha * n->mean + (1 - alpha) * x;             // eq. 8b
    const double var = alpha * n->var + alpha * (1 - alpha) * (d * d);  // eq. 8c
    if (std::isfinite(mean) && std::isfinite(var)) {
        n->mean = mean;
        n->var = var;
    }
    return n->y;
}

double onlinenorm_neuron_backward(onlinenorm_neuron* n, double grad_y) {
    const double tilde = grad_y - (1 - n->alpha_bwd) * n->control_y * n->y;                   // eq. 11a
    const double grad_x = tilde / n->sigma - (1 - n->alpha_bwd) * n->control_1;               // eq. 12a
    const double control_y = n->control_y + tilde * n->y, control_1 = n->control_1 + grad_x;  // eqs. 11b, 12b
    if (std::isfinite(control_y) && std::isfinite(control_1)) {
        n->control_y = control_y;
        n->control_1 = control_1;
    }
    return grad_x;
}
