// The meta-gradient of one task of a multilayer perceptron by one thread of a CPU. See `kernel.cu` for the notation.
//
// `plan.py` puts the constants in capitals in front of this file. A vector holds 16 rows of a batch, or 16 inputs of a
// layer: activations and slopes lie as (units, rows), and activations, which the gradients of weights are products
// with, as (rows, units) too. The last dimension of every array is padded to a multiple of 16. Padded rows hold numbers
// that nothing reads; padded inputs are zero. All sums have a fixed order.

#include <cmath>
#include <cstdlib>

typedef float Vector __attribute__((vector_size(64)));
typedef int Ints __attribute__((vector_size(64)));

namespace {

enum Activation { RELU, TANH, SIGMOID, SILU, GELU };
constexpr bool CURVED = ACTIVATION != RELU;
// Sums that stay in registers: products with vectors of rows, outputs of outer products.
#ifdef __AVX512F__
constexpr int BLOCK = 8, OUTER_BLOCK = 4;
#else
constexpr int BLOCK = 4, OUTER_BLOCK = 2;
#endif
constexpr int LANES = 16, ROWS = SUPPORT > QUERY ? SUPPORT : QUERY;

constexpr int padded(int n) { return (n + LANES - 1) / LANES * LANES; }
constexpr int ROW_STRIDE = padded(ROWS);

// Where the arrays of a layer begin in a set of parameters, and those of its inputs and outputs in a pass over rows.
constexpr int weight_at(int layer) {
    int at = 0;
    for (int l = 0; l < layer; ++l) at += WIDTH[l + 1] * padded(WIDTH[l]) + padded(WIDTH[l + 1]);
    return at;
}
constexpr int bias_at(int layer) { return weight_at(layer) + WIDTH[layer + 1] * padded(WIDTH[layer]); }
constexpr int PARAMS = weight_at(LAYERS);

enum Array { VALUE, FIRST, SECOND_DERIVATIVE, BELOW, SLOPE, BY_ROW, NUM_ARRAYS };
constexpr int size_of(int layer, int array) {
    const int units = WIDTH[layer];
    if (array == BY_ROW) return ROWS * padded(units);
    if (array == SLOPE) return layer > 0 ? units * ROW_STRIDE : 0;
    if (array == VALUE) return units * ROW_STRIDE;
    if (layer == 0) return 0;
    return array == FIRST || CURVED ? units * ROW_STRIDE : 0;
}
// Of the units of a layer of units (0: the inputs of the network, LAYERS: its outputs).
constexpr int array_at(int layer, int array) {
    int at = 0;
    for (int l = 0; l < layer; ++l)
        for (int a = 0; a < NUM_ARRAYS; ++a) at += size_of(l, a);
    for (int a = 0; a < array; ++a) at += size_of(layer, a);
    return at;
}
constexpr int PASS = array_at(LAYERS, NUM_ARRAYS) + (LABELS ? WIDTH[LAYERS] * ROW_STRIDE : 0);
constexpr int SHARE_AT = array_at(LAYERS, NUM_ARRAYS);
constexpr int ARENA = (STEPS + 2) * PARAMS + (STEPS + 1) * PASS + PASS;

inline Vector load(const float* at) { return *reinterpret_cast<const Vector*>(at); }
inline void store(float* at, Vector value) { *reinterpret_cast<Vector*>(at) = value; }
inline Vector all(float value) { return value - Vector{}; }

inline Vector exponential(Vector x) {
    const Vector bounded = x < -87.3f ? all(-87.3f) : x > 88.3f ? all(88.3f) : x;
    const Vector shifted = bounded * 1.44269504f + 12582912.0f;  // rounds to an integer
    const Vector n = shifted - 12582912.0f;
    const Vector r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Ints power = ((Ints)shifted - 0x4b400000) << 23;  // casts of vectors keep the bits
    return x == x ? (Vector)((Ints)p + power) : x;
}

inline Vector magnitude(Vector x) { return x < 0.0f ? -x : x; }

inline Vector hyperbolic_tangent(Vector z) {
    const Vector e = exponential(magnitude(z) * -2.0f), large = (1.0f - e) / (1.0f + e), s = z * z;
    const Vector small = z * (1.0f + s * (-1 / 3.0f + s * (2 / 15.0f + s * (-17 / 315.0f + s * (62 / 2835.0f)))));
    return magnitude(z) < 0.2f ? small : z < 0.0f ? -large : large;
}

// Abramowitz and Stegun, 7.1.26: an absolute error of 1.5e-7.
inline Vector error_function(Vector x) {
    const Vector t = 1.0f / (1.0f + 0.3275911f * magnitude(x));
    const Vector p = (((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f;
    const Vector value = 1.0f - p * t * exponential(-x * x);
    return x < 0.0f ? -value : value;
}

inline void activate(Vector z, Vector& value, Vector& first, Vector& second) {
    if constexpr (ACTIVATION == RELU) {  // NaN stays NaN
        value = z <= 0.0f ? (NEGATIVE_SLOPE > 0 ? NEGATIVE_SLOPE * z : Vector{}) : z;
        first = z <= 0.0f ? all(NEGATIVE_SLOPE) : all(1.0f);
    } else if constexpr (ACTIVATION == TANH) {
        value = hyperbolic_tangent(z);
        first = 1.0f - value * value;
        second = -2.0f * value * first;
    } else if constexpr (ACTIVATION == GELU) {
        const Vector below = 0.5f * (1.0f + error_function(z * 0.7071067811865476f));
        const Vector density = exponential(-0.5f * z * z) * 0.3989422804014327f;
        value = z * below;
        first = below + z * density;
        second = density * (2.0f - z * z);
    } else {
        const Vector share = 1.0f / (1.0f + exponential(-z)), slope = share * (1.0f - share);
        if constexpr (ACTIVATION == SIGMOID) {
            value = share;
            first = slope;
            second = slope * (1.0f - 2.0f * share);
        } else {
            value = z * share;
            first = share + z * slope;
            second = slope * (2.0f + z * (1.0f - 2.0f * share));
        }
    }
}

// sums[b] = sum over k of matrix[(first + b) OUTER + k INNER] vectors[k], for COUNT values of b.
template <int COUNT, int DEPTH, int OUTER, int INNER>
inline void products(const float* matrix, const float* vectors, Vector* sums) {
    for (int b = 0; b < COUNT; ++b) sums[b] = Vector{};
    for (int k = 0; k < DEPTH; ++k) {
        const Vector v = load(vectors + k * ROW_STRIDE);
#pragma GCC unroll 16
        for (int b = 0; b < COUNT; ++b) sums[b] += matrix[b * OUTER + k * INNER] * v;
    }
}

// Call body(begin, count as a type) for 0 .. TOTAL - 1 in blocks of SIZE and a rest.
template <int N> struct Count { static constexpr int value = N; };
template <int NUM, int SIZE, class Body> inline void in_blocks(Body body) {
    for (int begin = 0; begin + SIZE <= NUM; begin += SIZE) body(begin, Count<SIZE>());
    if constexpr (NUM % SIZE > 0) body(NUM - NUM % SIZE, Count<NUM % SIZE>());
}

// The vectors of rows of all units: out(unit, at, sum) for the sums of one product, or of two.
template <int UNITS, int DEPTH, int OUTER, int INNER, int NUM_ROWS, class Out>
inline void product(const float* matrix, const float* vectors, Out out) {
    for (int r = 0; r < NUM_ROWS; r += LANES)
        in_blocks<UNITS, BLOCK>([&](int unit, auto count) {
            Vector sums[count.value];
            products<count.value, DEPTH, OUTER, INNER>(matrix + unit * OUTER, vectors + r, sums);
            for (int b = 0; b < count.value; ++b) out(unit + b, (unit + b) * ROW_STRIDE + r, sums[b]);
        });
}
template <int UNITS, int DEPTH, int OUTER, int INNER, int NUM_ROWS, class Out>
inline void two_products(const float* matrix, const float* vectors, const float* other, const float* others, Out out) {
    for (int r = 0; r < NUM_ROWS; r += LANES)
        in_blocks<UNITS, BLOCK>([&](int unit, auto count) {
            Vector sums[count.value], more[count.value];
            products<count.value, DEPTH, OUTER, INNER>(matrix + unit * OUTER, vectors + r, sums);
            products<count.value, DEPTH, OUTER, INNER>(other + unit * OUTER, others + r, more);
            for (int b = 0; b < count.value; ++b) out(unit + b, (unit + b) * ROW_STRIDE + r, sums[b], more[b]);
        });
}

// sums[b][i] += slopes^T inputs, summed over rows, for COUNT outputs and WIDE vectors of inputs.
template <int COUNT, int WIDE, int STRIDE_OF_INPUTS, int NUM_ROWS>
inline void add_outer(const float* slopes, const float* inputs, Vector (*sums)[WIDE]) {
    for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < WIDE; ++i) {
            const Vector v = load(inputs + r * STRIDE_OF_INPUTS + i * LANES);
#pragma GCC unroll 4
            for (int b = 0; b < COUNT; ++b) sums[b][i] += slopes[b * ROW_STRIDE + r] * v;
        }
}

// The outer products of all outputs and inputs of a layer, of one pair or two: out(position in the weight, sum).
template <int L, int NUM_ROWS, bool TWO, class Out>
inline void outer_products(const float* slopes, const float* inputs, const float* others, const float* more, Out out) {
    constexpr int stride = padded(WIDTH[L]);
    in_blocks<WIDTH[L + 1], OUTER_BLOCK>([&](int o, auto count) {
        in_blocks<stride / LANES, 4>([&](int i, auto wide) {
            Vector sums[count.value][wide.value] = {};
            add_outer<count.value, wide.value, stride, NUM_ROWS>(slopes + o * ROW_STRIDE, inputs + i * LANES, sums);
            if constexpr (TWO)
                add_outer<count.value, wide.value, stride, NUM_ROWS>(others + o * ROW_STRIDE, more + i * LANES, sums);
            for (int b = 0; b < count.value; ++b)
                for (int k = 0; k < wide.value; ++k) out((o + b) * stride + (i + k) * LANES, sums[b][k]);
        });
    });
}

template <int L, int NUM_ROWS> inline float sum_of_rows(const float* slopes, int unit) {
    float sum = 0.0f;
    for (int r = 0; r < NUM_ROWS; ++r) sum += slopes[unit * ROW_STRIDE + r];
    return sum;
}

// (units, rows) to (rows, units).
template <int UNITS, int NUM_ROWS> inline void transpose(const float* from, float* to) {
    for (int u = 0; u < UNITS; ++u)
        for (int r = 0; r < NUM_ROWS; ++r) to[r * padded(UNITS) + u] = from[u * ROW_STRIDE + r];
}

// z = a W^T + b, and the activations and their derivatives; the outputs are stored as slopes.
template <int L, int NUM_ROWS> void forward(const float* theta, float* pass) {
    constexpr int inputs = WIDTH[L], outputs = WIDTH[L + 1];
    const float* bias = theta + bias_at(L);
    product<outputs, inputs, padded(inputs), 1, NUM_ROWS>(
        theta + weight_at(L), pass + array_at(L, VALUE), [&](int unit, int at, Vector sum) {
            const Vector z = sum + bias[unit];
            if constexpr (L == LAYERS - 1) {
                store(pass + array_at(L + 1, SLOPE) + at, z);
            } else {
                Vector value, first, second;
                activate(z, value, first, second);
                store(pass + array_at(L + 1, VALUE) + at, value);
                store(pass + array_at(L + 1, FIRST) + at, first);
                if constexpr (CURVED) store(pass + array_at(L + 1, SECOND_DERIVATIVE) + at, second);
            }
        });
    if constexpr (L < LAYERS - 1) {
        transpose<outputs, NUM_ROWS>(pass + array_at(L + 1, VALUE), pass + array_at(L + 1, BY_ROW));
        forward<L + 1, NUM_ROWS>(theta, pass);
    }
}

// Replace the outputs of a pass by their slopes; returns the mean loss over rows.
template <int NUM_ROWS> float slopes_of_outputs(float* pass, const float* targets, const int* labels) {
    constexpr int outputs = WIDTH[LAYERS];
    float* slopes = pass + array_at(LAYERS, SLOPE);
    float total = 0.0f;
    for (int r = 0; r < NUM_ROWS; r += LANES) {
        Vector loss = {};
        if constexpr (LABELS) {
            Vector top = load(slopes + r), sum = {}, logarithm;
            for (int o = 1; o < outputs; ++o) {
                const Vector z = load(slopes + o * ROW_STRIDE + r);
                top = z <= top ? top : z;  // NaN stays NaN
            }
            for (int o = 0; o < outputs; ++o) sum += exponential(load(slopes + o * ROW_STRIDE + r) - top);
            for (int k = 0; k < LANES; ++k) logarithm[k] = std::log(sum[k]);
            const Ints label = *reinterpret_cast<const Ints*>(labels + r);
            for (int o = 0; o < outputs; ++o) {
                float* at = slopes + o * ROW_STRIDE + r;
                const Vector shifted = load(at) - top, share = exponential(shifted) / sum;
                Vector target = label == o ? all(1.0f - SMOOTHING) : Vector{};
                target = label < 0 ? all(std::nanf("")) : target + SMOOTHING / outputs;
                loss -= target * (shifted - logarithm);
                store(pass + SHARE_AT + o * ROW_STRIDE + r, share);
                store(at, (share - target) / float(NUM_ROWS));
            }
        } else {
            for (int o = 0; o < outputs; ++o) {
                float* at = slopes + o * ROW_STRIDE + r;
                const Vector error = load(at) - load(targets + o * ROW_STRIDE + r);
                loss += error * error / float(outputs);
                store(at, error * (2.0f / (NUM_ROWS * outputs)));
            }
        }
        for (int k = 0; k < LANES && r + k < NUM_ROWS; ++k) total += loss[k];
    }
    return total / NUM_ROWS;
}

// The parameters after one gradient step or, without DESCEND, the gradient; and the slopes of all units.
template <int L, int NUM_ROWS, bool DESCEND>
void backward(const float* theta, float* pass, const float* rates, float* result) {
    constexpr int inputs = WIDTH[L], outputs = WIDTH[L + 1];
    const float* slopes = pass + array_at(L + 1, SLOPE);
    outer_products<L, NUM_ROWS, false>(slopes, pass + array_at(L, BY_ROW), nullptr, nullptr, [&](int at, Vector sum) {
        store(result + weight_at(L) + at, DESCEND ? load(theta + weight_at(L) + at) - rates[2 * L] * sum : sum);
    });
    for (int o = 0; o < outputs; ++o) {
        const float sum = sum_of_rows<L, NUM_ROWS>(slopes, o);
        result[bias_at(L) + o] = DESCEND ? theta[bias_at(L) + o] - rates[2 * L + 1] * sum : sum;
    }
    if constexpr (L > 0) {
        product<inputs, outputs, 1, padded(inputs), NUM_ROWS>(
            theta + weight_at(L), slopes, [&](int, int at, Vector sum) {
                if constexpr (CURVED) store(pass + array_at(L, BELOW) + at, sum);
                store(pass + array_at(L, SLOPE) + at, sum * load(pass + array_at(L, FIRST) + at));
            });
        backward<L - 1, NUM_ROWS, DESCEND>(theta, pass, rates, result);
    }
}

// The derivatives of all outputs in the direction D lambda, at the pass of an inner step.
template <int L>
void forward_dot(const float* theta, const float* lambda, const float* pass, float* dots, const float* rates) {
    constexpr int inputs = WIDTH[L], outputs = WIDTH[L + 1], stride = padded(inputs);
    auto out = [&](int unit, int at, Vector moved, Vector carried) {
        const Vector z_dot = rates[2 * L] * moved + carried + rates[2 * L + 1] * lambda[bias_at(L) + unit];
        if constexpr (L == LAYERS - 1) {
            store(dots + array_at(L + 1, SLOPE) + at, LABELS ? z_dot : z_dot * (2.0f / (SUPPORT * outputs)));
        } else {
            store(dots + array_at(L + 1, VALUE) + at, load(pass + array_at(L + 1, FIRST) + at) * z_dot);
            if constexpr (CURVED) {
                const Vector bent = load(pass + array_at(L + 1, SECOND_DERIVATIVE) + at) * z_dot;
                store(dots + array_at(L + 1, BELOW) + at, bent * load(pass + array_at(L + 1, BELOW) + at));
            }
        }
    };
    const float *v = lambda + weight_at(L), *values = pass + array_at(L, VALUE);
    if constexpr (L == 0) {
        product<outputs, inputs, stride, 1, SUPPORT>(
            v, values, [&](int unit, int at, Vector sum) { out(unit, at, sum, Vector{}); });
    } else {
        two_products<outputs, inputs, stride, 1, SUPPORT>(
            v, values, theta + weight_at(L), dots + array_at(L, VALUE), out);
    }
    if constexpr (L < LAYERS - 1) {
        transpose<outputs, SUPPORT>(dots + array_at(L + 1, VALUE), dots + array_at(L + 1, BY_ROW));
        forward_dot<L + 1>(theta, lambda, pass, dots, rates);
    }
}

// With labels, the derivatives of the slopes of the outputs from those of the outputs.
void slopes_dot_of_outputs(const float* pass, float* dots) {
    constexpr int outputs = WIDTH[LAYERS];
    for (int r = 0; r < SUPPORT; r += LANES) {
        float* at = dots + array_at(LAYERS, SLOPE) + r;
        const float* share = pass + SHARE_AT + r;
        Vector sum = {};
        for (int o = 0; o < outputs; ++o) sum += load(share + o * ROW_STRIDE) * load(at + o * ROW_STRIDE);
        for (int o = 0; o < outputs; ++o) {
            const Vector centred = load(at + o * ROW_STRIDE) - sum;
            store(at + o * ROW_STRIDE, load(share + o * ROW_STRIDE) * centred / float(SUPPORT));
        }
    }
}

// lambda - H D lambda.
template <int L>
void backward_dot(
    const float* theta, const float* lambda, const float* pass, float* dots, const float* rates, float* result) {
    constexpr int inputs = WIDTH[L], outputs = WIDTH[L + 1];
    const float *slopes = pass + array_at(L + 1, SLOPE), *slopes_dot = dots + array_at(L + 1, SLOPE);
    outer_products<L, SUPPORT, (L > 0)>(
        slopes_dot, pass + array_at(L, BY_ROW), slopes, dots + array_at(L, BY_ROW), [&](int at, Vector sum) {
            store(result + weight_at(L) + at, load(lambda + weight_at(L) + at) - sum);
        });
    for (int o = 0; o < outputs; ++o)
        result[bias_at(L) + o] = lambda[bias_at(L) + o] - sum_of_rows<L, SUPPORT>(slopes_dot, o);
    if constexpr (L > 0) {
        two_products<inputs, outputs, 1, padded(inputs), SUPPORT>(
            theta + weight_at(L), slopes_dot, lambda + weight_at(L), slopes,
            [&](int, int at, Vector carried, Vector moved) {
                Vector sum = (carried + rates[2 * L] * moved) * load(pass + array_at(L, FIRST) + at);
                if constexpr (CURVED) sum += load(dots + array_at(L, BELOW) + at);
                store(dots + array_at(L, SLOPE) + at, sum);
            });
        backward_dot<L - 1>(theta, lambda, pass, dots, rates, result);
    }
}

// Copy parameters between flat order and padded rows.
template <int L> void unpack(const float* flat, float* params) {
    for (int o = 0; o < WIDTH[L + 1]; ++o) {
        for (int i = 0; i < WIDTH[L]; ++i)
            params[weight_at(L) + o * padded(WIDTH[L]) + i] = flat[FLAT_WEIGHT[L] + o * WIDTH[L] + i];
        params[bias_at(L) + o] = FLAT_BIAS[L] < 0 ? 0.0f : flat[FLAT_BIAS[L] + o];
    }
    if constexpr (L < LAYERS - 1) unpack<L + 1>(flat, params);
}

template <int L> void pack(const float* params, float* flat) {
    for (int o = 0; o < WIDTH[L + 1]; ++o) {
        for (int i = 0; i < WIDTH[L]; ++i)
            flat[FLAT_WEIGHT[L] + o * WIDTH[L] + i] = params[weight_at(L) + o * padded(WIDTH[L]) + i];
        if constexpr (FLAT_BIAS[L] >= 0) flat[FLAT_BIAS[L] + o] = params[bias_at(L) + o];
    }
    if constexpr (L < LAYERS - 1) pack<L + 1>(params, flat);
}

// The inputs of a task as both layouts.
template <int NUM_ROWS> void copy_inputs(const float* x, float* pass) {
    float *values = pass + array_at(0, VALUE), *by_row = pass + array_at(0, BY_ROW);
    for (int r = 0; r < NUM_ROWS; ++r)
        for (int i = 0; i < WIDTH[0]; ++i)
            values[i * ROW_STRIDE + r] = by_row[r * padded(WIDTH[0]) + i] = x[r * WIDTH[0] + i];
}

// Targets as (outputs, rows), labels as int; a label out of range becomes -1.
template <int NUM_ROWS, class Target> void copy_targets(const Target* y, float* targets, int* labels) {
    for (int r = 0; r < NUM_ROWS; ++r) {
        if constexpr (LABELS)
            labels[r] = y[r] >= 0 && y[r] < WIDTH[LAYERS] ? int(y[r]) : -1;
        else
            for (int o = 0; o < WIDTH[LAYERS]; ++o) targets[o * ROW_STRIDE + r] = float(y[r * WIDTH[LAYERS] + o]);
    }
}

// The memory of a thread, filled with zeros.
struct Memory {
    float* arena = static_cast<float*>(std::aligned_alloc(64, padded(ARENA) * sizeof(float)));
    Memory() {
        for (int i = 0; arena && i < ARENA; ++i) arena[i] = 0.0f;
    }
    ~Memory() { std::free(arena); }
};

// The gradient and the loss of a task; false if there is no memory.
bool task_gradient(
    const float* flat, const float* rates, const float* support_x, const SupportTarget* support_y, const float* query_x,
    const QueryTarget* query_y, float* gradient, float* loss) {
    static thread_local Memory memory;
    if (!memory.arena) return false;
    alignas(64) float support_targets[LABELS ? 1 : WIDTH[LAYERS] * ROW_STRIDE] = {};
    alignas(64) float query_targets[LABELS ? 1 : WIDTH[LAYERS] * ROW_STRIDE] = {};
    alignas(64) int support_labels[ROW_STRIDE] = {}, query_labels[ROW_STRIDE] = {};
    float *thetas = memory.arena, *lambda = thetas + (STEPS + 1) * PARAMS, *passes = lambda + PARAMS;
    unpack<0>(flat, thetas);
    copy_targets<SUPPORT>(support_y, support_targets, support_labels);
    copy_targets<QUERY>(query_y, query_targets, query_labels);
    for (int s = 0; s < STEPS; ++s) {
        float *theta = thetas + s * PARAMS, *pass = passes + s * PASS;
        copy_inputs<SUPPORT>(support_x, pass);
        forward<0, SUPPORT>(theta, pass);
        slopes_of_outputs<SUPPORT>(pass, support_targets, support_labels);
        backward<LAYERS - 1, SUPPORT, true>(theta, pass, rates, theta + PARAMS);
    }
    float *theta = thetas + STEPS * PARAMS, *pass = passes + STEPS * PASS, *dots = pass + PASS, *next = theta;
    copy_inputs<QUERY>(query_x, pass);
    forward<0, QUERY>(theta, pass);
    *loss = slopes_of_outputs<QUERY>(pass, query_targets, query_labels);
    backward<LAYERS - 1, QUERY, false>(theta, pass, rates, lambda);
    for (int s = STEPS - 1; SECOND && s >= 0; --s) {
        theta = thetas + s * PARAMS, pass = passes + s * PASS;
        forward_dot<0>(theta, lambda, pass, dots, rates);
        if constexpr (LABELS) slopes_dot_of_outputs(pass, dots);
        backward_dot<LAYERS - 1>(theta, lambda, pass, dots, rates, next);
        float* swapped = lambda;
        lambda = next, next = swapped;
    }
    pack<0>(lambda, gradient);
    return true;
}

}  // namespace

// The gradients (learners * tasks, TOTAL) and losses of all tasks, and their means over the tasks of each learner; the
// arguments are those of `kernel.cu`. Returns 0, or 1 if there is no memory.
extern "C" int task_gradients(
    int learners, int tasks, int threads, const float* flat, const float* rates, const float* support_x,
    const SupportTarget* support_y, const float* query_x, const QueryTarget* query_y, float* gradients, float* losses,
    float* mean_gradients, float* mean_losses) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed) if (threads > 1)
    for (long long t = 0; t < static_cast<long long>(learners) * tasks; ++t)
        failed |= !task_gradient(
            flat + t / tasks * TOTAL, rates, support_x + t * SUPPORT * WIDTH[0], support_y + t * SUPPORT * TARGETS,
            query_x + t * QUERY * WIDTH[0], query_y + t * QUERY * TARGETS, gradients + t * TOTAL, losses + t);
    for (int learner = 0; learner < learners && !failed; ++learner) {
        const float* rows = gradients + static_cast<long long>(learner) * tasks * TOTAL;
        float *mean = mean_gradients + static_cast<long long>(learner) * TOTAL, loss = 0.0f;
        for (int i = 0; i < TOTAL; ++i) mean[i] = 0.0f;
        for (int t = 0; t < tasks; ++t) {
            for (int i = 0; i < TOTAL; ++i) mean[i] += rows[static_cast<long long>(t) * TOTAL + i];
            loss += losses[learner * tasks + t];
        }
        for (int i = 0; i < TOTAL; ++i) mean[i] /= tasks;
        mean_losses[learner] = loss / tasks;
    }
    return failed;
}
