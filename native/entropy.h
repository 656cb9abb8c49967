// Cross entropy of rows of scores against classes, and its gradient: each reads the scores, and nothing else of their
// size is kept between the two.
#pragma once
#include <cstdint>

namespace cp {

// Python fills it in. Arrays are float32, row by row.
struct Scores {
  const float* scores;        // rows x classes
  const int64_t* targets;     // the class of each row
  float* sums;                // of each row the logarithm of the sum of its exponentials
  float* gradient;            // rows x classes
  uint64_t rows, classes;
  int64_t ignored;            // rows with this target have no loss and no gradient
  double factor;              // of the gradient
};

// What all rows lose together, and how many are not ignored.
struct Lost {
  double sum;
  uint64_t count;
};

// Fills in `sums` and what is lost. Returns whether all targets are classes; if not, what is lost is unspecified.
bool entropy(const Scores& given, Lost& lost);

// Fills in `gradient` from what `entropy` has filled in.
void entropy_gradient(const Scores& given);

}  // namespace cp
